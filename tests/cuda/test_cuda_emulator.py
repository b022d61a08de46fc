"""The emulator that runs CUDA kernels on the CPU: does it compute what a GPU would, and refuse what a GPU would?"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator

import emulation
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
FORMATS = ("fp32", "bf16", "fp16")
ORDERS = ("forward", "reverse", "random:1", "random:2")
LANES = np.arange(32)


@pytest.fixture(scope="module")
def sample() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulation.link("sample", (emulation.HERE / "sample.cu",))))
    library.sample_error.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def probe() -> Callable[..., str]:
    """Call a function of probe.cu; the error message of its launch, empty if there was none."""
    library = ctypes.CDLL(str(emulation.link("probe", (emulation.HERE / "probe.cu",))))
    library.probe_error.restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> str:
        given = [pointer(a) if isinstance(a, np.ndarray) else a for a in arguments]
        status = getattr(library, f"probe_{name}")(*given)
        return library.probe_error(status).decode() if status else ""

    return call


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("PYDML_EMULATOR_ORDER", request.param)
    yield request.param


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "d"), [(1, 8), (65, 24), (200, 72)])
def test_kernels_compute_the_same_in_every_order(sample: ctypes.CDLL, n: int, d: int, format: str, order: str) -> None:
    x = np.random.default_rng(n).standard_normal((n, d))
    stored = to_bf16(x) if format == "bf16" else x.astype(np.float16 if format == "fp16" else np.float32)
    numbers = (from_bf16(stored) if format == "bf16" else stored).astype(np.float64)
    best = np.full(n, np.nan, np.float32)
    status = sample.sample_nearest(FORMATS.index(format), pointer(stored), pointer(best), n, d, None)
    assert status == 0, sample.sample_error(status)
    products = numbers @ numbers.T
    np.fill_diagonal(products, -np.inf)
    np.testing.assert_allclose(best, products.max(1), rtol=1e-5)


# Lane layouts, each written down as the PTX ISA states it (sections «Matrix fragments for mma.m16n8k16 with floating
# point type», «… mma.m16n8k8», «ldmatrix»): row and column of element i of a lane's fragment.


def a_k16(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, member * 2 + (i & 1) + (0 if i < 4 else 8)


def b_k16(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return member * 2 + (i & 1) + (0 if i < 2 else 8), group


def a_k8(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return group if i in (0, 2) else group + 8, member if i in (0, 1) else member + 4


def b_k8(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return member if i == 0 else member + 4, group


def c_any(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return group if i < 2 else group + 8, member * 2 + (i & 1)


def fragments(matrix: np.ndarray, layout: Callable[[int, int], tuple[int, int]], elements: int) -> np.ndarray:
    """What each lane holds of a matrix [32, elements]."""
    return np.array([[matrix[layout(lane, i)] for i in range(elements)] for lane in LANES])


@pytest.mark.parametrize("format", ["bf16", "fp16", "tf32"])
def test_mma_takes_and_leaves_fragments_as_documented(probe: Callable[..., str], format: str, order: str) -> None:
    rng = np.random.default_rng(3)
    depth = 8 if format == "tf32" else 16
    a, b, c = rng.standard_normal((16, depth)), rng.standard_normal((depth, 8)), rng.standard_normal((16, 8))
    if format == "tf32":  # the 13 lowest bits are there to be ignored
        stored = [m.astype(np.float32).view(np.uint32) for m in (a, b)]
        a, b = ((bits & 0xFFFFE000).view(np.float32).astype(np.float64) for bits in stored)
        registers = [fragments(stored[0], a_k8, 4), fragments(stored[1], b_k8, 2)]
    else:
        stored = [to_bf16(m) if format == "bf16" else m.astype(np.float16).view(np.uint16) for m in (a, b)]
        a, b = (from_bf16(m) if format == "bf16" else m.view(np.float16) for m in stored)
        registers = [fragments(stored[0], a_k16, 8), fragments(stored[1], b_k16, 4)]
        registers = [np.ascontiguousarray(r).view(np.uint32) for r in registers]
    d = fragments(c.astype(np.float32), c_any, 4)
    assert probe("mma", ["bf16", "fp16", "tf32"].index(format), *registers, d) == ""
    want = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float32)
    np.testing.assert_allclose(d, fragments(want, c_any, 4), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_out_rows_as_documented(probe: Callable[..., str], transposed: bool, order: str) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)  # lane 8m+r names row r of matrix m
    got = np.zeros((32, 4), np.uint32)
    assert probe("ldmatrix", matrices, got, transposed) == ""
    for lane in LANES:
        for m in range(4):
            matrix = matrices[m].T if transposed else matrices[m]
            first, second = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            assert got[lane, m] == int(first) | int(second) << 16, f"lane {lane}, matrix {m}"


# Warp and block functions


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_read_the_lane_they_name(probe: Callable[..., str], width: int, order: str) -> None:
    first = LANES - LANES % width
    for by in (1, 3, 8, 31):
        sources = {
            0: first + by % width,
            1: np.where((LANES ^ by) < first + width, LANES ^ by, LANES),
            2: np.where(LANES + by < first + width, LANES + by, LANES),
            3: np.where(LANES - by >= first, LANES - by, LANES),
        }
        for kind, source in sources.items():
            got = np.zeros(32, np.int32)
            assert probe("shuffle", kind, 0xFFFFFFFF, by, width, got) == ""
            np.testing.assert_array_equal(got, 100 + source)


def test_masked_shuffles_leave_the_other_lanes_alone(probe: Callable[..., str], order: str) -> None:
    got = np.full(32, -5, np.int32)
    assert probe("shuffle", 1, 0x00FF00F0, 1, 32, got) == ""
    inside = np.array([0x00FF00F0 >> lane & 1 for lane in LANES], bool)
    np.testing.assert_array_equal(got, np.where(inside, 100 + (LANES ^ 1), -5))


def test_votes_and_matches_are_those_of_the_warp_and_the_block(probe: Callable[..., str], order: str) -> None:
    x = np.random.default_rng(5).integers(-2, 3, 96).astype(np.int32)
    x[64:] = 1  # a warp where all agree
    got = np.zeros((96, 7), np.uint32)
    assert probe("votes", x, 96, got) == ""
    for t in range(96):
        warp = x[t // 32 * 32 :][:32]
        ballot = sum(1 << lane for lane in range(32) if warp[lane] > 0)
        match = sum(1 << lane for lane in range(32) if warp[lane] == x[t])
        block = (x > 0).sum(), (x > 0).any(), (x > 0).all()
        assert got[t].tolist() == [ballot, (warp > 0).any(), (warp > 0).all(), match, *block]


def test_atomics_lose_nothing_between_threads_and_blocks(probe: Callable[..., str], order: str) -> None:
    x = np.random.default_rng(6).integers(-1000, 1000, 5000).astype(np.int32)
    got = np.zeros(5, np.int32)
    assert probe("atomics", x, len(x), got) == ""
    either = np.bitwise_or.reduce(x)
    assert got.tolist() == [x.sum(), x.max(), x.min(), either, np.bitwise_xor.reduce(x)]


@pytest.mark.parametrize("bytes_", [0, 4, 12, 16])
def test_copies_arrive_with_their_wait_and_not_before(probe: Callable[..., str], bytes_: int) -> None:
    x = np.arange(1, 9, dtype=np.float32)
    x = x[(-x.ctypes.data % 16) // 4 :][:4]  # cp.async wants 16-byte aligned addresses
    got = np.zeros((3, 4), np.float32)
    assert probe("copy", x, bytes_, got) == ""
    assert np.isnan(got[:2]).all()  # shared memory that nothing was written to; a copy under way
    np.testing.assert_array_equal(got[2], np.where(np.arange(4) * 4 < bytes_, x, 0))


def test_misaligned_copies_are_refused(probe: Callable[..., str]) -> None:
    x = np.zeros(8, np.float32)
    x = x[(-x.ctypes.data % 16) // 4 + 1 :]
    assert "cp.async: an address is not 16-byte aligned" in probe("copy", x, 16, np.zeros(12, np.float32))


def test_numbers_are_rounded_as_the_hardware_does(probe: Callable[..., str]) -> None:
    bits = np.random.default_rng(7).integers(0, 2**32, 20000, dtype=np.uint32)
    bits[::2] &= 0xFFFFF000  # many ties
    x = bits.view(np.float32)
    x = np.concatenate((x[np.isfinite(x)], np.float32([0, -0.0, 65504, 65520, 1e-8, 6e-8, 3e38, np.inf, -np.inf])))
    bf16, fp16, tf32 = (np.zeros(len(x), dtype) for dtype in (np.uint16, np.uint16, np.uint32))
    assert probe("convert", x, len(x), bf16, fp16, tf32) == ""
    np.testing.assert_array_equal(bf16, to_bf16(x))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(fp16, x.astype(np.float16).view(np.uint16))
    # TF32 has 10 bits after the point: the nearest of its numbers, ties away from zero.
    finite = np.isfinite(x) & (np.abs(x) < 3e38) & (np.abs(x) > 1e-37)
    exponent = np.floor(np.log2(np.abs(x[finite]).astype(np.float64)))
    steps = np.abs(x[finite]).astype(np.float64) / 2.0 ** (exponent - 10)
    want = np.sign(x[finite]) * np.floor(steps + 0.5) * 2.0 ** (exponent - 10)
    np.testing.assert_array_equal(tf32[finite].view(np.float32), want)


# Limits


def count(
    probe: Callable[..., str], grid: tuple[int, ...], block: tuple[int, ...], shared: int = 0, taken: int = 0
) -> str:
    """Launch a kernel that counts its threads; the error, or the empty string if every thread ran once."""
    n = int(np.prod(grid)) * int(np.prod(block))
    ran = np.zeros(min(n, 1 << 20), np.int32)
    dims = np.array(grid, np.uint32), np.array(block, np.uint32)
    error = probe("count", *dims, ctypes.c_size_t(shared), ctypes.c_size_t(taken), ran)
    assert error or (ran == 1).all()
    return error


def test_every_thread_of_the_grid_runs_once(probe: Callable[..., str], order: str) -> None:
    assert count(probe, (3, 4, 5), (8, 4, 2)) == ""
    assert count(probe, (1, 1, 1), (1024, 1, 1)) == ""
    assert count(probe, (7, 1, 1), (33, 1, 1)) == ""


@pytest.mark.parametrize(
    ("grid", "block", "what"),
    [
        ((1, 1, 1), (1025, 1, 1), "threads of a block"),
        ((1, 1, 1), (33, 32, 1), "threads of a block"),
        ((1, 1, 1), (0, 1, 1), "threads of a block"),
        ((1, 1, 1), (1, 1, 65), "threads of a block"),
        ((0, 1, 1), (32, 1, 1), "blocks of the grid"),
        ((1, 65536, 1), (32, 1, 1), "blocks of the grid"),
        ((1, 1, 65536), (32, 1, 1), "blocks of the grid"),
        ((2**31, 1, 1), (32, 1, 1), "blocks of the grid"),
    ],
)
def test_launches_beyond_the_limits_are_refused(
    probe: Callable[..., str], grid: tuple[int, ...], block: tuple[int, ...], what: str
) -> None:
    assert count(probe, grid, block) == f"invalid configuration: {what}"
    assert count(probe, (1, 1, 1), (32, 1, 1)) == "", "an error must not stay behind"


@pytest.mark.parametrize(("arch", "kibibytes"), [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_shared_memory_ends_where_the_architecture_says(
    probe: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arch: int, kibibytes: int
) -> None:
    monkeypatch.setenv("PYDML_EMULATOR_ARCH", str(arch))
    most = kibibytes * 1024
    assert count(probe, (1, 1, 1), (32, 1, 1), shared=most, taken=most) == ""
    assert f"the architecture has {most}" in count(probe, (1, 1, 1), (32, 1, 1), shared=most + 128)


def test_pieces_beyond_what_was_launched_with_are_refused(probe: Callable[..., str]) -> None:
    error = count(probe, (1, 1, 1), (32, 1, 1), shared=1024, taken=1025)
    assert "pieces of 1025 bytes taken, launched with 1024" in error


def test_unknown_orders_are_named(probe: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDML_EMULATOR_ORDER", "sideways")
    assert "got 'sideways', wanted forward, reverse or random:SEED" in count(probe, (1, 1, 1), (32, 1, 1))
