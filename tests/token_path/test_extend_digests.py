"""Digests of blocks behind the first, against a CBOR library and a digest for each."""

from array import array
from hashlib import sha256

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.token_path.implementations import NATIVE, PYTHON, Implementation

BOUNDARIES = [0, 1, 23, 24, 25, 255, 256, 257, 65_535, 65_536, 65_537, 2**31 - 1]


def expected(digests: list[bytes], token_ids: "array[int]", num_blocks: int, block_len: int) -> list[bytes]:
    digests = digests[:]
    for i in range(len(digests), num_blocks):
        block = token_ids[i * block_len : (i + 1) * block_len].tolist()
        digests.append(sha256(cbor2.dumps((digests[-1], block, None), canonical=True)).digest())
    return digests


@pytest.mark.parametrize("token_id", BOUNDARIES)
def test_a_token_takes_as_many_bytes_as_it_needs(path: Implementation, token_id: int) -> None:
    digests = [b"\x07" * 32]
    token_ids = array("i", [9, token_id])
    wanted = expected(digests, token_ids, 2, 1)
    assert path.extend_digests(digests, token_ids, 2, 1) is None
    assert digests == wanted


@pytest.mark.parametrize("token_id", [-1, -24, -25, -256, -257, -65_536, -65_537, -(2**31)])
def test_a_number_below_zero_is_one_as_well(path: Implementation, token_id: int) -> None:
    digests = [b"\x07" * 32]
    token_ids = array("i", [9, token_id])
    wanted = expected(digests, token_ids, 2, 1)
    path.extend_digests(digests, token_ids, 2, 1)
    assert digests == wanted


@pytest.mark.parametrize("block_len", range(1, 301))
def test_a_block_may_have_any_length(path: Implementation, block_len: int) -> None:
    token_ids = array("i", ((BOUNDARIES[i % 12] + i * i) % 2**31 for i in range(4 * block_len)))
    digests = [b"\x01" * 32]
    wanted = expected(digests, token_ids, 4, block_len)
    path.extend_digests(digests, token_ids, 4, block_len)
    assert digests == wanted
    assert len(set(digests)) == 4


@pytest.mark.parametrize("parent_len", [0, 1, 23, 24, 31, 32, 33, 255, 256, 65_535, 65_536, 100_000])
@pytest.mark.parametrize("block_len", [1, 16])
def test_a_parent_may_have_any_length(path: Implementation, parent_len: int, block_len: int) -> None:
    token_ids = array("i", [2**31 - 1] * (3 * block_len))
    digests = [bytes(i % 251 for i in range(parent_len))]
    wanted = expected(digests, token_ids, 3, block_len)
    path.extend_digests(digests, token_ids, 3, block_len)
    assert digests == wanted


def test_a_block_of_more_tokens_than_two_bytes_count(path: Implementation) -> None:
    for block_len in (65_535, 65_536):
        token_ids = array("i", range(2 * block_len))
        digests = [b""]
        wanted = expected(digests, token_ids, 2, block_len)
        path.extend_digests(digests, token_ids, 2, block_len)
        assert digests == wanted


def test_only_what_is_lacking_is_appended(path: Implementation) -> None:
    token_ids = array("i", range(100))
    whole = expected([b"\x01" * 32], token_ids, 6, 16)
    for num_known in range(1, 7):
        digests = whole[:num_known]
        path.extend_digests(digests, token_ids, 6, 16)
        assert digests == whole


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, 2])
def test_blocks_that_have_digests_get_none(path: Implementation, num_blocks: int) -> None:
    digests = [b"a", b"b"]
    path.extend_digests(digests, array("i", range(32)), num_blocks, 16)
    assert digests == [b"a", b"b"]


@pytest.mark.parametrize("block_len", [2**31, 2**62])
def test_no_blocks_have_no_digests_however_long_they_are(path: Implementation, block_len: int) -> None:
    digests = [b"a"]
    path.extend_digests(digests, array("i", [1]), 0, block_len)
    assert digests == [b"a"]


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "block_len"), [(31, 2, 16), (0, 1, 1), (31, 2**31, 16), (31, 16, 2**31)]
)
def test_fewer_tokens_than_the_blocks_have_are_refused(
    path: Implementation, num_tokens: int, num_blocks: int, block_len: int
) -> None:
    digests = [b"a"]
    with pytest.raises(ValueError, match="fewer tokens"):
        path.extend_digests(digests, array("i", range(num_tokens)), num_blocks, block_len)
    assert digests == [b"a"]


def test_exactly_as_many_tokens_are_enough(path: Implementation) -> None:
    digests = [b"a"]
    path.extend_digests(digests, array("i", range(32)), 2, 16)
    assert len(digests) == 2


@pytest.mark.parametrize("block_len", [0])
def test_a_block_has_tokens(path: Implementation, block_len: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two says it differs
        path.extend_digests([b"a"], array("i", range(32)), 2, block_len)


def test_the_tokens_may_be_appended_to_afterwards(path: Implementation) -> None:
    token_ids = array("i", range(32))
    path.extend_digests([b"a"], token_ids, 2, 16)
    token_ids.append(1)  # refused while somebody holds its buffer
    with pytest.raises(ValueError, match="fewer tokens"):
        path.extend_digests([b"a"], token_ids, 3, 16)
    token_ids.append(1)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([], array("i"), 1, 1),
        ((b"a",), array("i", [1, 1]), 2, 1),
        ([b"a"], [1, 1], 2, 1),
        ([b"a"], array("i", [1, 1]), "2", 1),
        ([b"a"], array("i", [1, 1]), 2, "1"),
        (["a"], array("i", [1, 1]), 2, 1),
    ],
    ids=["none", "no digest", "a tuple", "a list of tokens", "number", "length", "a text"],
)
def test_wrong_arguments_are_an_error_in_c(native: Implementation, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        native.extend_digests(*arguments)


@given(
    st.lists(st.binary(max_size=70), min_size=1, max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.sampled_from(BOUNDARIES), max_size=80),
    st.integers(-1, 8),
    st.integers(1, 40),
)
def test_both_say_what_the_libraries_say(
    digests: list[bytes], ids: list[int], num_blocks: int, block_len: int
) -> None:
    token_ids = array("i", ids)
    for path in (PYTHON, NATIVE):
        if path is None:
            continue
        got = digests[:]
        if num_blocks * block_len > len(ids):
            with pytest.raises(ValueError, match="fewer tokens"):
                path.extend_digests(got, token_ids, num_blocks, block_len)
            assert got == digests
        else:
            path.extend_digests(got, token_ids, num_blocks, block_len)
            assert got == expected(digests, token_ids, num_blocks, block_len)
