from array import array

from asyncserve.loop.prefix_hash import block_digest, root_digest


def test_equal_tokens_after_equal_parents_have_equal_digests() -> None:
    assert block_digest(root_digest(None), array("i", [1, 2])) == block_digest(
        root_digest(None), array("i", [1, 2])
    )


def test_digest_depends_on_every_token_and_on_their_order() -> None:
    root = root_digest(None)
    digests = {block_digest(root, array("i", ids)) for ids in ([1, 2], [2, 1], [1, 3], [258, 0], [1, 2, 0])}
    assert len(digests) == 5


def test_digest_depends_on_everything_before_the_block() -> None:
    tokens = array("i", [5, 6])
    first = block_digest(root_digest(None), array("i", [1, 2]))
    other = block_digest(root_digest(None), array("i", [3, 4]))
    assert block_digest(first, tokens) != block_digest(other, tokens)


def test_different_salts_share_nothing_and_an_empty_salt_is_one() -> None:
    assert len({root_digest(None), root_digest(""), root_digest("a"), root_digest("b")}) == 4
    assert root_digest("a") == root_digest("a")
