"""Who runs, why the others do not, and what people read when nothing can."""

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from sdx_kernels import (
    InvalidInputs,
    LowerTriangularMask,
    UnsupportedInputs,
    attend,
    choose,
    count,
    explain,
    target,
)
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.target import Target
from sdx_kernels.testing import assert_close, random_inputs, reference64
from sdx_kernels.tuning.attention import AttentionConfig, config_for, ladder_for, shared_bytes

CAPABILITIES = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def pretend(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int = 101376
) -> None:
    """Dispatch sees an NVIDIA card; the tensors stay on the CPU."""
    card = Target("cuda", capability, shared, f"sm_{capability[0]}{capability[1]}", 30)
    monkeypatch.setattr(target, "of", lambda device: card)
    monkeypatch.setattr(target, "interpreting", lambda: False)
    monkeypatch.setattr(target, "triton_status", lambda: (True, None))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_case_043_capability_decides_before_any_compile(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    pretend(monkeypatch, capability)
    inputs = random_inputs(1, 77, 77, 2, 64, dtype=dtype)
    mask = torch.ones(77, 77, dtype=torch.bool)
    plain, masked = choose(*inputs), choose(*inputs, attn_bias=mask)
    causal = choose(*inputs, attn_bias=LowerTriangularMask())
    if capability < (8, 0):
        assert {plain.name, masked.name, causal.name} <= {"sdpa", "reference"}
        assert any("(too old)" in reason for reason in plain.reasons["triton"])
        with pytest.raises(InvalidInputs, match="too old"):
            attend(*inputs, op="triton")
    else:
        assert masked.name == causal.name == "triton"
        assert not explain(*inputs)["triton"]
        # where torch's kernel is kept, the reason says so
        assert plain.name == "triton" or plain.reasons["triton"]


@pytest.mark.parametrize("masked", [False, True])
def test_case_044_bfloat16_on_an_old_card_is_computed_by_the_fallback(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    pretend(monkeypatch, (7, 5), 65536)
    inputs = random_inputs(2, 33, 77, 2, 64, dtype=torch.bfloat16)
    bias = torch.rand(33, 77) > 0.2 if masked else None
    seen: list[torch.dtype] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(query.dtype)
        return plain(query, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    out, choice = attend(*inputs, attn_bias=bias)
    assert choice.name == ("reference" if masked else "sdpa")
    assert seen == ([] if masked else [torch.float32])
    assert out.dtype == torch.bfloat16
    assert_close(out, reference64(*inputs, bias))


@pytest.mark.parametrize("limit", [49152, 65536, 101376, 166912, 232448])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [77, 4096])
@pytest.mark.parametrize("biased", [False, True])
def test_case_045_tiles_fit_the_cards_shared_memory(
    limit: int, head_dim: int, dtype: torch.dtype, keys: int, biased: bool
) -> None:
    for capability in CAPABILITIES:
        config = config_for(capability, head_dim, head_dim, dtype, keys, biased, False, limit)
        assert config is not None
        assert shared_bytes(config, head_dim, head_dim, dtype.itemsize, biased) <= limit
        assert config.source


def test_case_045_a_refused_launch_goes_on_with_a_smaller_tile(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    from sdx_kernels._triton import attention_fwd, attention_launch

    tried: list[int] = []
    allowed = 0

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
            def launch(*args: object, **kwargs: object) -> object:
                tried.append(int(str(kwargs["BLOCK_M"])))
                if len(tried) <= refusals:
                    raise OutOfResources(135168, allowed, "shared memory")
                return real[grid](*args, **kwargs)

            return launch

    real = attention_fwd.attention_fwd_kernel
    monkeypatch.setattr(attention_fwd, "attention_fwd_kernel", Kernel())
    monkeypatch.setattr(attention_launch, "_steps", {})
    inputs = random_inputs(1, 20, 200, 1, 64, dtype=torch.float16)
    ladder = ladder_for((8, 0), 64, 64, torch.float16, 200)
    assert len(ladder) > 2

    refusals = 1
    out, _ = attend(*inputs, op="triton")
    assert_close(out, reference64(*inputs))
    assert tried == [ladder[0].block_m, ladder[1].block_m]
    attend(*inputs, op="triton")
    assert tried[2:] == [ladder[1].block_m]

    # nothing fits: the next implementation serves the call, and the choice says why
    tried.clear()
    attention_launch._steps.clear()
    refusals = 10**6
    masked = torch.ones(20, 200, dtype=torch.bool)
    monkeypatch.setattr("sdx_kernels.ops.attention.allowed_by", lambda op: ("triton", "reference"))
    out, choice = attend(*inputs, attn_bias=masked, op="torch")
    assert choice.name == "reference"
    assert any("shared memory" in reason for reason in choice.reasons["triton"])
    assert_close(out, reference64(*inputs))


def test_case_029_the_grid_lies_on_x() -> None:
    pytest.importorskip("triton")
    from sdx_kernels._triton.attention_fwd import grid_for

    for batch, heads, queries in ((65537, 1, 16), (8193, 8, 16), (70000, 1, 4), (2, 10, 4096)):
        x, y, z = grid_for(batch, heads, queries, 64)
        assert (y, z) == (1, 1)
        assert x == batch * heads * ((queries + 63) // 64)
        assert x < 2**31


@pytest.mark.parametrize("how", ["None", "ImportError", "OSError", "RuntimeError"])
def test_case_143_without_triton_everything_works_and_says_so_once(how: str) -> None:
    code = f"""
import logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("sdx_kernels").addHandler(Keep())
logging.getLogger("sdx_kernels").setLevel(logging.DEBUG)
how = {how!r}
if how == "None":
    sys.modules["triton"] = None
else:
    import importlib.abc
    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "triton": raise getattr(__import__("builtins"), how)("broken build")
    sys.meta_path.insert(0, Broken())
import torch
from sdx_kernels import attend, explain
from sdx_kernels.testing import reference64
q = torch.randn(1, 9, 2, 16)
for _ in range(3):
    out, choice = attend(q, q, q)
    assert choice.name in ("sdpa", "reference"), choice
    assert any("Triton cannot be imported" in r for r in choice.reasons["triton"]), choice
    explain(q, q, q)
assert (out - reference64(q, q, q)).abs().max() < 2e-5
assert [level for level, _ in lines] == ["INFO"], lines
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_loads_no_triton_and_asks_no_device() -> None:
    code = """
import sys
import torch
loaded = "triton" in sys.modules
torch.cuda.get_device_properties = torch.cuda.is_available = None
import sdx_kernels, sdx_kernels.ops
assert ("triton" in sys.modules) == loaded
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_interpreter_runs_only_when_asked_for(interpreter: None) -> None:
    inputs = random_inputs(1, 5, 7, 1, 16)
    assert target.interpreting()
    before = count("triton")
    _, choice = attend(*inputs)
    assert choice.name == "sdpa"
    assert count("triton") == before
    assert any("TRITON_INTERPRET" in reason for reason in choice.reasons["triton"])


def test_case_148_devices_must_agree() -> None:
    q, k, v = random_inputs(1, 5, 7, 1, 16)
    with pytest.raises(ValueError, match="query is on cpu and key on meta"):
        attend(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="query is on cpu and attn_bias on meta"):
        attend(q, k, v, torch.zeros(5, 7, device="meta"))


def test_meta_tensors_have_shape_and_dtype() -> None:
    q, k, v = (t.to("meta", torch.float16) for t in random_inputs(2, 5, 7, 3, 16, 24))
    for bias in (None, LowerTriangularMask(), torch.zeros(5, 7, device="meta")):
        out, _ = attend(q, k, v, bias)
        assert (out.shape, out.dtype, out.device.type) == ((2, 5, 3, 24), torch.float16, "meta")


def test_nothing_fits_lists_inputs_candidates_and_every_reason() -> None:
    q = torch.zeros(1, 5, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedInputs) as error:
        attend(q, q, q, p=0.5)
    text = str(error.value)
    assert isinstance(error.value, NotImplementedError)
    assert text.startswith(
        "No operator found for `memory_efficient_attention_forward` with inputs:\n"
        "     query       : shape=(1, 5, 2, 16) (torch.float8_e4m3fn)\n"
        "     key         : shape=(1, 5, 2, 16) (torch.float8_e4m3fn)\n"
        "     value       : shape=(1, 5, 2, 16) (torch.float8_e4m3fn)\n"
        "     attn_bias   : <class 'NoneType'>\n"
        "     p           : 0.5\n"
    )
    for name in OPERATOR.names():
        assert f"`{name}` is not supported because:" in text
    assert "dtype=torch.float8_e4m3fn (supported: " in text
    assert "dropout > 0.0" in text
    assert "Nearest inputs that would work:" in text


def test_all_reasons_are_given_not_the_first() -> None:
    q, k, v = random_inputs(1, 5, 7, 1, 300)
    reasons = explain(q.double(), k.double(), v.double(), p=0.1)["triton-short"]
    text = "\n".join(reasons)
    for part in ("device=cpu", "dtype=torch.float64", "> 128", "dropout > 0.0"):
        assert part in text


@pytest.mark.parametrize(
    ("op", "error", "words"),
    [
        ("sdpa-cudnn", ValueError, "`sdpa-cudnn` is not supported because"),
        ("nonsense", ValueError, "no implementation named 'nonsense'"),
    ],
)
def test_an_explicit_choice_that_cannot_is_a_value_error(
    op: str, error: type[Exception], words: str
) -> None:
    inputs = random_inputs(1, 5, 7, 1, 16)
    with pytest.raises(error, match=words) as caught:
        attend(*inputs, op=op)
    if op != "nonsense":
        works = str(caught.value).rsplit("work as they are: ", 1)[1]
        assert works.endswith("(op=None picks by itself)")
        for name in ("sdpa", "reference", "triton", "sdpa-flash", "sdpa-math"):
            assert f"'{name}'" in works


@pytest.mark.parametrize("op", ["sdpa", "sdpa-flash", "sdpa-math", "reference", "torch", "auto"])
def test_named_implementations_agree(op: str) -> None:
    inputs = random_inputs(2, 33, 45, 2, 40)
    out, choice = attend(*inputs, op=op)
    assert_close(out, reference64(*inputs))
    if op not in ("torch", "auto"):
        assert choice.name == op
    else:
        assert choice.name == "sdpa"


def test_xformers_operators_are_understood() -> None:
    class FwOp:
        NAME = "fa2F-pt"

    class Unknown:
        NAME = "ckF"

    inputs = random_inputs(1, 5, 7, 1, 16)
    assert attend(*inputs, op=(FwOp, None))[1].name == "sdpa-flash"
    assert attend(*inputs, op=FwOp)[1].name == "sdpa-flash"
    assert attend(*inputs, op=(None, None))[1].name == "sdpa"
    with pytest.raises(InvalidInputs, match="ckF"):
        attend(*inputs, op=Unknown)


def test_the_off_switch_leaves_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 6))
    inputs = random_inputs(1, 9, 9, 1, 16)
    mask = torch.ones(9, 9, dtype=torch.bool)
    assert choose(*inputs, attn_bias=mask).name == "triton"
    monkeypatch.setenv("SDX_DISABLE", "1")
    assert choose(*inputs, attn_bias=mask).name == "reference"
    assert choose(*inputs, attn_bias=mask, op="triton").name == "triton"


def test_automatic_backwards_repeat_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), 232448)
    for keys, name in ((128, "sdpa"), (77, "triton-short")):
        q, k, v = random_inputs(1, 64, keys, 1, 64, dtype=torch.float16)
        assert choose(q, k, v).name == name
        assert choose(q.requires_grad_(), k, v).name == "triton"


@pytest.mark.parametrize(
    ("capability", "queries", "keys", "dim", "dtype", "name"),
    [
        ((9, 0), 4096, 77, 64, torch.float16, "triton-short"),
        ((9, 0), 16, 16, 40, torch.bfloat16, "triton-short"),
        ((9, 0), 4096, 77, 64, torch.float32, "sdpa"),
        ((9, 0), 4096, 77, 80, torch.float16, "sdpa"),
        ((9, 0), 4096, 154, 64, torch.float16, "sdpa"),
        ((9, 0), 4096, 4096, 64, torch.float16, "sdpa"),
        ((9, 0), 1024, 1024, 64, torch.bfloat16, "triton-tma"),
        ((9, 0), 1024, 1023, 64, torch.bfloat16, "sdpa"),
        ((9, 0), 4096, 4096, 40, torch.bfloat16, "triton-tma"),
        ((9, 0), 1024, 1024, 40, torch.bfloat16, "sdpa"),
        ((8, 9), 4096, 4096, 64, torch.bfloat16, "sdpa"),
        ((9, 0), 4096, 4096, 512, torch.float16, "triton-wide"),
        ((9, 0), 4096, 4096, 512, torch.float32, "sdpa"),
        ((9, 0), 256, 256, 512, torch.float16, "sdpa"),
        ((8, 6), 4096, 77, 64, torch.float16, "sdpa"),
        ((12, 0), 4096, 4096, 512, torch.float16, "sdpa"),
    ],
)
def test_unmasked_attention_goes_where_a_card_was_fastest(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    name: str,
) -> None:
    pretend(monkeypatch, capability, 232448)
    q = torch.empty(1, queries, 1, dim, dtype=dtype)
    k = torch.empty(1, keys, 1, dim, dtype=dtype)
    choice = choose(q, k, k)
    assert choice.name == name
    assert all(choice.reasons[other] for other in choice.reasons)


def test_launches_are_counted_by_name() -> None:
    inputs = random_inputs(1, 5, 7, 1, 16)
    before = count("reference")
    attend(*inputs, op="reference")
    attend(*inputs, attn_bias=LowerTriangularMask(), op="reference")
    assert count("reference") == before + 2


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_dropout_outside_zero_to_one_is_refused(p: float) -> None:
    with pytest.raises(InvalidInputs, match="between 0 and 1"):
        attend(*random_inputs(1, 5, 7, 1, 16), p=p)


def test_ladders_fall_in_shared_memory() -> None:
    for head_dim in (16, 64, 128, 256):
        for dtype in (torch.float16, torch.float32):
            ladder = ladder_for((9, 0), head_dim, head_dim, dtype, 4096)
            sizes = [shared_bytes(c, head_dim, head_dim, dtype.itemsize) for c in ladder]
            assert sizes == sorted(sizes, reverse=True)
            assert all(isinstance(config, AttentionConfig) for config in ladder)
    assert ladder_for((9, 0), 512, 512, torch.float16, 4096) == ()


def test_nothing_is_logged_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="sdx_kernels"):
        attend(*random_inputs(1, 5, 7, 1, 16))
    assert caplog.records == []
