"""``tritonddp bench``: what is timed is right, and what is wrong is not timed."""

import argparse
import dataclasses
import json

import pytest
import torch

from tritonddp.cli import bench
from tritonddp.cli.kernel_timing import buckets, quantizers

SIZES = ["--sizes", "64x32,48", "--rounds", "2"]


def main(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args([*words, "--device", "cpu"]))


def test_every_kernel_is_timed_beside_torch_and_a_copy(capsys):
    kernels = ["flatten", "unflatten", "quantize", "reduce_parts", "dequantize"]
    assert main(*SIZES, "--kernels", *kernels, "--dtype", "fp32", "bf16", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert "plain torch" in content["ran"]
    rows = {(row["kernel"], row["dtype"]): row for row in content["rows"]}
    assert set(rows) == {(kernel, dtype) for kernel in kernels for dtype in ("fp32", "bf16")}
    numel = 64 * 32 + 48
    assert rows["flatten", "fp32"]["bytes"] == 2 * 4 * numel
    assert rows["unflatten", "bf16"]["bytes"] == 2 * 2 * numel
    for row in rows.values():
        assert row["rounds"] == 2
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        low, high = row["ratio"][1:]
        assert 0 < low <= row["ratio"][0] <= high


def test_the_table_has_a_line_for_each(capsys):
    assert main(*SIZES) == 0
    out = capsys.readouterr().out
    for kernel in ("flatten", "unflatten", "quantize", "reduce_parts", "dequantize"):
        assert f"\n{kernel:<17}64x32,48" in out


@pytest.mark.parametrize("kernel", ["flatten", "quantize"])
def test_a_wrong_result_is_not_timed(kernel, capsys, monkeypatch):
    module = quantizers if kernel == "quantize" else buckets
    table = module.CONTENDERS if kernel == "quantize" else module.DIRECTIONS
    ours, *others = table[kernel]

    def wrong(inputs):
        ours.run(inputs)
        target = inputs.flat.outgoing.numbers if kernel == "quantize" else inputs.ours.payload
        target.zero_()

    monkeypatch.setitem(table, kernel, (dataclasses.replace(ours, run=wrong), *others))
    monkeypatch.setattr(quantizers, "_quantize", wrong)
    assert main(*SIZES, "--kernels", kernel) == 1
    out, err = capsys.readouterr()
    assert not out
    assert f"{kernel}, 64x32,48, fp32: " in err


@pytest.mark.parametrize("size", ["resnet", "0x3", "4,,5", "3x"])
def test_no_sizes_are_a_usage_error(size, capsys):
    with pytest.raises(SystemExit) as end:
        main("--sizes", size)
    assert end.value.code == 2
    assert "many_small" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_cuda_is_a_usage_error(capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.main(parser.parse_args(["--device", "cuda"])) == 2
    assert "no CUDA device" in capsys.readouterr().err
