from array import array
from hashlib import sha256

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.token_path import block_digest, root_digest

ROOT = root_digest("0")


def test_equal_tokens_after_equal_parents_have_equal_digests() -> None:
    assert block_digest(ROOT, array("i", [1, 2])) == block_digest(root_digest("0"), array("i", [1, 2]))


def test_digest_depends_on_every_token_and_on_their_order() -> None:
    digests = {block_digest(ROOT, array("i", ids)) for ids in ([1, 2], [2, 1], [1, 3], [258, 0], [1, 2, 0])}
    assert len(digests) == 5


def test_digest_depends_on_everything_before_the_block() -> None:
    tokens = array("i", [5, 6])
    first = block_digest(ROOT, array("i", [1, 2]))
    other = block_digest(ROOT, array("i", [3, 4]))
    assert block_digest(first, tokens) != block_digest(other, tokens)


def test_different_salts_and_seeds_share_nothing_and_an_empty_salt_is_one() -> None:
    tokens = array("i", [5, 6])
    salts = [None, "", "a", "b", "\ud800", "\ud801", "é"]
    assert len({block_digest(ROOT, tokens, salt) for salt in salts}) == len(salts)
    assert block_digest(ROOT, tokens, "a") == block_digest(ROOT, tokens, "a")
    assert len({root_digest(seed) for seed in ("", "0", "1", "random")}) == 4


def encoded(number: int) -> bytes:
    """Write an integer in as few bytes of CBOR as there can be (RFC 8949, 3 and 4.2.1)."""
    if number < 24:
        return bytes([number])
    for length, head in ((1, 0x18), (2, 0x19), (4, 0x1A)):
        if number < 256**length:
            return bytes([head]) + number.to_bytes(length, "big")
    raise AssertionError


@pytest.mark.parametrize("num_tokens", [1, 16, 23, 24, 255, 256, 1024])
def test_a_digest_is_that_of_parent_tokens_and_nothing_else_in_canonical_cbor(num_tokens: int) -> None:
    ids = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1][:num_tokens]
    ids += range(100, 100 + num_tokens - len(ids))
    length = encoded(num_tokens)
    content = b"\x83\x58\x20" + ROOT + bytes([length[0] | 0x80]) + length[1:] + b"".join(map(encoded, ids))
    assert block_digest(ROOT, array("i", ids)) == sha256(content + b"\xf6").digest()
    assert block_digest(ROOT, array("i", ids), "salt") == sha256(content + b"\x81\x64salt").digest()


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**31 - 1), max_size=300),
    st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_digest_is_of_what_a_cbor_library_writes(
    parent: bytes, ids: list[int], cache_salt: str | None
) -> None:
    content = cbor2.dumps((parent, ids, None if cache_salt is None else (cache_salt,)), canonical=True)
    assert block_digest(parent, array("i", ids), cache_salt) == sha256(content).digest()


def test_the_root_is_the_digest_of_the_seed_as_text() -> None:
    assert sha256(b"\x61\x30").digest() == ROOT
    assert ROOT.hex().startswith("4e1195df020d")
