"""gpukern info, doctor and explain, by the console script's entry point; tune and bench stand in test_tuning.py."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_python

import torch_gpukern
from torch_gpukern import doctor
from torch_gpukern.cli import main


def run(*args):
    """Exit status and standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(args)
    return status, out.getvalue()


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"gpukern {torch_gpukern.__version__}\n"


def test_the_console_script_is_this_main(monkeypatch, capsys):
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert re.search(r'^\[project.scripts\]\ngpukern = "torch_gpukern.cli:main"$', text, re.M)
    for name, prog in (("/x/bin/gpukern", "gpukern"), ("-m", "python -m torch_gpukern")):
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(SystemExit):
            main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {prog} ")


def test_info_as_json():
    status, out = run("info", "--json")
    known = json.loads(out)
    assert status == 0 and known == doctor.facts()
    assert known["gpukern"] == torch_gpukern.__version__ and known["torch"] == torch.__version__
    assert known["cpu_isa"] in known["cpu_isas"]
    assert "cpu_isas" not in run("info")[1] and known["library"] in run("info")[1]


def test_explain_as_json():
    status, out = run("explain", "gemm", "5", "6", "7", "--json")
    assert status == 0 and json.loads(out) == torch_gpukern.explain("gemm", torch.empty(5, 7), torch.empty(7, 6))
    found = json.loads(run("explain", "flash_attn", "--seq-q", "32", "--json", "--measure")[1])
    assert found.pop("measured_us") > 0
    q = torch.empty(1, 8, 32, 64)
    assert found == torch_gpukern.explain("flash_attn", q, q, q)


def test_doctor():
    status, out = run("doctor")
    assert status == 0 and out.endswith("everything that is here works\n")
    assert "ok      calls on cpu: gemm and flash_attn, forward and backward" in out
    status, out = run("doctor", "--json")
    names = [check["name"] for check in json.loads(out)]
    assert status == 0 and names[:3] == ["library", "cpu", "calls on cpu"] and "cuda" in names
    assert set(json.loads(out)[0]) == {"name", "ok", "found", "todo"}


def test_doctor_finds_what_is_wrong(monkeypatch, tmp_path):
    real = doctor.gemm
    monkeypatch.setattr(doctor, "gemm", lambda *args, **options: real(*args, **options) * 1.01)
    status, out = run("doctor")
    assert status == 1 and "FAILED  calls on cpu: results are wrong by " in out and out.endswith("checks failed\n")
    monkeypatch.setattr(doctor, "gemm", real)
    broken = tmp_path / "tuned.json"
    broken.write_text("{")
    monkeypatch.setenv("GPUKERN_TUNED", str(broken))
    status, out = run("doctor")
    assert status == 1 and f"FAILED  tuned gemms: {broken}: it is not JSON" in out and f"to do: remove {broken}" in out


def test_doctor_of_an_instruction_set_that_is_not_there():
    done = run_python(
        "from torch_gpukern.cli import main; raise SystemExit(main(['doctor']))",
        env={"GPUKERN_CPU": "banana"},
        check=False,
    )
    assert done.returncode == 1 and "to do: unset GPUKERN_CPU, or name one that this machine has" in done.stdout
