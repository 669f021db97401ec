import numpy as np
import pytest
import torch

from asyncserve.gpu.sampling.gumbel import draw, exponential, row_keys, seed_keys
from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU
from tests.gpu.sampling.rows import assert_drawn_from

pytest.importorskip("triton")
import triton
import triton.language as tl

from asyncserve.gpu.kernels import sampling
from asyncserve.gpu.kernels.sampling import DEFAULT_CONFIG, ChoiceConfig, Destination, choose_tokens

pytestmark = MARKS

SMALL = ChoiceConfig(blocks_per_program=2, num_warps=1)
BAD, EMPTY = -1, -2
VOCABS = [1, 100, 128, 1000, 5000] + ([151_936, 128_256, 49_152] if ON_GPU else [])


class Rows:
    """Rows of logits, each with its own slot, seed and position."""

    def __init__(
        self, logits: torch.Tensor, *, temperature: float = 0.8, first_seed: int = 0, position: int = 7
    ) -> None:
        num_rows = len(logits)
        self.logits = logits.to(DEVICE)
        self.slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        self.positions = torch.full((num_rows,), position, device=DEVICE)
        self.seed_keys = seed_keys(np.arange(first_seed, first_seed + num_rows, dtype=np.uint64))
        self.inv_temperature = torch.full(
            (num_rows,), 1.0 / temperature if temperature else 0.0, device=DEVICE
        )
        self.thresholds: torch.Tensor | None = None

    def choose(
        self, *, config: ChoiceConfig = DEFAULT_CONFIG, destination: Destination | None = None
    ) -> torch.Tensor:
        return choose_tokens(
            self.logits,
            self.slots,
            self.positions,
            seed_keys=torch.from_numpy(self.seed_keys).to(DEVICE),
            inv_temperature=self.inv_temperature,
            thresholds=self.thresholds,
            bad_token=BAD,
            empty_token=EMPTY,
            destination=destination,
            config=config,
        ).cpu()

    def drawn_by_torch(self) -> torch.Tensor:
        logits = self.logits.cpu().float()
        weights = ((logits - logits.amax(1, keepdim=True)) * self.inv_temperature.cpu()[:, None]).exp()
        if self.thresholds is not None:
            weights *= logits >= self.thresholds.cpu()[:, None]
        keys = row_keys(self.seed_keys, self.positions.cpu().numpy().astype(np.uint64))
        return draw(weights, torch.from_numpy(keys).unsqueeze(1))


def some_logits(num_rows: int, vocab: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread


@triton.jit  # type: ignore[untyped-decorator]
def _noise(keys_ptr: tl.tensor, ids_ptr: tl.tensor, out_ptr: tl.tensor, LEN: tl.constexpr) -> None:
    at = tl.arange(0, LEN)
    key = tl.load(keys_ptr + tl.program_id(0)).to(tl.uint64, bitcast=True)
    tl.store(out_ptr + tl.program_id(0) * LEN + at, sampling._exponential(key, tl.load(ids_ptr + at)))


@pytest.mark.slow
def test_noise_is_that_of_the_reference_to_the_last_bits() -> None:
    keys = torch.from_numpy(
        row_keys(seed_keys(np.arange(16, dtype=np.uint64)), np.arange(16, dtype=np.uint64))
    )
    ids = torch.arange(-1024, 1024, dtype=torch.int32)
    out = torch.empty(16, 2048, device=DEVICE)
    _noise[(16,)](keys.to(DEVICE), ids.to(DEVICE), out, LEN=2048)
    expected = exponential(keys.unsqueeze(1), ids.to(torch.int64).unsqueeze(0))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=0.0)


# The kernel loads logits as float32: in the interpreter, which is slow, other dtypes need one length.
@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, DEFAULT_CONFIG], ids=["small", "default"])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (vocab, dtype)
        for vocab in VOCABS
        for dtype in DTYPES
        if ON_GPU or dtype == torch.float32 or vocab == 1000
    ],
)
def test_tokens_are_those_of_the_reference(vocab: int, dtype: torch.dtype, config: ChoiceConfig) -> None:
    logits = some_logits(8 if ON_GPU else 4, vocab).to(dtype)
    for position in range(3, 6 if ON_GPU else 4):
        rows = Rows(logits, first_seed=1000 * position, position=position)
        assert torch.equal(rows.choose(config=config), rows.drawn_by_torch())
        rows.thresholds = logits.float().quantile(0.9, dim=1).to(DEVICE) if vocab < 10_000 else None
        assert torch.equal(rows.choose(config=config), rows.drawn_by_torch())


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 100.0])
def test_extreme_temperatures_draw_what_the_reference_draws(temperature: float) -> None:
    rows = Rows(some_logits(6, 700, 20.0), temperature=temperature)
    assert torch.equal(rows.choose(config=SMALL), rows.drawn_by_torch())


@pytest.mark.slow
def test_draws_follow_the_weights() -> None:
    num_draws, vocab = (20_000, 700) if ON_GPU else (400, 20)
    row = some_logits(1, vocab, 1.0)
    config = DEFAULT_CONFIG if ON_GPU else SMALL
    drawn = Rows(row.expand(num_draws, -1).contiguous(), temperature=0.7).choose(config=config)
    assert_drawn_from((row.double() / 0.7).softmax(1).squeeze(0).numpy(), drawn.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_greedy_row_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-4, 5, (9, 1300), generator=generator).to(dtype)
    logits[0] = -3.0
    logits[1, 1299] = 6.0
    logits[2, [700, 40, 41]] = 9.0
    assert torch.equal(Rows(logits, temperature=0.0).choose(config=SMALL), logits.float().argmax(1))


def test_greedy_and_drawing_rows_stand_side_by_side() -> None:
    logits = some_logits(6, 500)
    rows = Rows(logits)
    rows.inv_temperature[::2] = 0.0
    expected = rows.drawn_by_torch()
    expected[::2] = logits.argmax(1)[::2]
    assert torch.equal(rows.choose(config=SMALL), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_are_told_and_harm_no_other(dtype: torch.dtype, temperature: float) -> None:
    logits = some_logits(7, 900).to(dtype)
    healthy = Rows(logits, temperature=temperature).choose(config=SMALL)
    logits[0, 0] = torch.nan
    logits[1, 899] = torch.inf
    logits[2, 450] = torch.nan
    logits[2, 100] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    chosen = Rows(logits, temperature=temperature).choose(config=SMALL)
    assert chosen.tolist() == [BAD, BAD, BAD, EMPTY, 0, *healthy.tolist()[5:]]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_written_where_the_next_step_and_the_host_look(temperature: float) -> None:
    num_rows = 5
    rows = Rows(some_logits(num_rows, 300), temperature=temperature)
    rows.logits[1, 5] = torch.nan
    rows.slots[3] = -1
    history = torch.full((50,), 99, dtype=torch.int32, device=DEVICE)
    results = torch.full((4, 8), 99, pin_memory=ON_GPU)
    destination = Destination(
        history=history,
        write_back=torch.tensor([3, 11, 20, 49, 30], device=DEVICE),
        results=results,
        result_row=torch.tensor([2], dtype=torch.int32, device=DEVICE),
    )
    token_ids = rows.choose(config=SMALL, destination=destination).tolist()
    if ON_GPU:
        torch.cuda.synchronize()
    assert token_ids[1] == BAD
    expected = torch.full((4, 8), 99)
    expected[2, :5] = torch.tensor([token_ids[0], BAD, token_ids[2], 99, token_ids[4]])
    assert torch.equal(results, expected)
    written = torch.full((50,), 99, dtype=torch.int32)
    written[[3, 11, 20, 30]] = torch.tensor([token_ids[0], 0, token_ids[2], token_ids[4]], dtype=torch.int32)
    assert torch.equal(history.cpu(), written)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_depends_on_its_own_row_alone(dtype: torch.dtype) -> None:
    logits = some_logits(8, 1000).to(dtype)
    together = Rows(logits).choose()
    for row in (0, 5, 7):
        alone = Rows(logits[row : row + 1], first_seed=row)
        assert alone.choose()[0] == together[row]
        alone.thresholds = torch.full((1,), -torch.inf, device=DEVICE)
        assert alone.choose()[0] == together[row]


def test_rows_may_be_parts_of_wider_rows() -> None:
    wide = some_logits(4, 1000)
    rows, same = Rows(wide), Rows(wide[:, :700].contiguous())
    rows.logits = rows.logits[:, :700]
    assert torch.equal(rows.choose(config=SMALL), same.choose(config=SMALL))


@pytest.mark.skipif(not ON_GPU, reason="takes 5 GiB")
def test_rows_far_apart_are_found() -> None:
    storage = torch.zeros(2**31 + 640, dtype=torch.bfloat16, device=DEVICE)
    logits = storage.as_strided((2, 64), (2**31 + 512, 1))
    logits[1, 63] = 30.0
    assert Rows(logits, temperature=0.0).choose().tolist() == [0, 63]
