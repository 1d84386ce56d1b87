"""A proof file is read strictly: whatever it does not know, it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from st.launcher import free_port, torchrun_command
from st.proof import Proof, ProofError, load_proof
from st.supervisor import Fault

CHECKOUT = Path(__file__).parents[2]
PROOFS = sorted((CHECKOUT / "examples" / "training_demo" / "proofs").glob("*.yaml"))

SOUND = """
id: demo
title: a title
config: train.yaml
overrides: [--checkpoint.save_steps=10]
ranks: 4
script:
  - {leg: reference}
  - {leg: interrupted, fault: {kind: kill, after_step: 13}}
  - {leg: resumed, restore_from: LATEST, resumes_at: 10}
"""


def load(folder: Path, text: str) -> Proof:
    (folder / "train.yaml").write_text("training: {}\n")
    path = folder / "proof.yaml"
    path.write_text(text)
    return load_proof(path)


def test_a_sound_proof_is_read_whole(tmp_path: Path) -> None:
    proof = load(tmp_path, SOUND)
    assert (proof.id, proof.ranks, proof.overrides) == ("demo", 4, ("--checkpoint.save_steps=10",))
    assert proof.config == tmp_path / "train.yaml"
    assert [(leg.label, leg.restore_from, leg.resumes_at) for leg in proof.script] == [
        ("reference", None, None),
        ("interrupted", None, None),
        ("resumed", "LATEST", 10),
    ]
    assert proof.script[1].fault == Fault(kind="kill", moment="after_step", step=13)


def test_several_resumed_legs_are_numbered(tmp_path: Path) -> None:
    more = "  - {leg: resumed, restore_from: LATEST, resumes_at: 10, fault: {kind: kill, after_save: 20}}\n"
    last = "  - {leg: resumed, restore_from: LATEST, resumes_at: 20}\n"
    text = SOUND.rsplit("  - ", 1)[0] + more + last
    proof = load(tmp_path, text)
    assert [leg.label for leg in proof.script] == ["reference", "interrupted", "resumed-1", "resumed-2"]
    assert proof.script[2].fault == Fault(kind="kill", moment="after_save", step=20)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: a title", "titel: a title", r"unknown keys \['titel'\], missing keys \['title'\]"),
        ("id: demo", "id: ../demo", "id must be lower-case words"),
        ("id: demo", "id: demo\nid: demo", "repeated key"),
        ("ranks: 4", "ranks: '4'", "ranks must be a whole number from 1"),
        ("ranks: 4", "ranks: true", "ranks must be a whole number from 1"),
        ("config: train.yaml", "config: other.yaml", "config: no file"),
        ("[--checkpoint.save_steps=10]", "[checkpoint.save_steps=10]", "is not of the form --dotted.path=value"),
        ("[--checkpoint.save_steps=10]", "[--trajectory.dir=x]", "trajectory.dir is set by the harness"),
        ("ranks: 4", "ranks: 4\nmay_be_constant: [mood]", "may_be_constant"),
        ("leg: reference", "leg: referense", "leg must be one of"),
        ("{leg: reference}", "{leg: reference, resumes_at: 1}", r"unknown keys \['resumes_at'\]"),
        (", resumes_at: 10", "", r"missing keys \['resumes_at'\]"),
        ("restore_from: LATEST", "restore_from: NEWEST", "restore_from must be LATEST"),
        ("kind: kill", "kind: murder", "kind must be kill"),
        ("after_step: 13", "after_step: 13, after_save: 10", "exactly one of after_step and after_save"),
        ("after_step: 13", "after_lunch: 13", r"unknown keys \['after_lunch'\]"),
        ("after_step: 13", "after_step: 0", "after_step must be a whole number from 1"),
        (", fault: {kind: kill, after_step: 13}", "", r"missing keys \['fault'\]"),
        ("resumes_at: 10", "resumes_at: 10, fault: {kind: kill, after_step: 20}", "the last leg runs to the end"),
        ("  - {leg: reference}\n", "", "script must be reference, interrupted, resumed"),
    ],
)
def test_whatever_is_wrong_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SOUND
    with pytest.raises(ProofError, match=message):
        load(tmp_path, SOUND.replace(old, new, 1))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="No such file"):
        load_proof(tmp_path / "proof.yaml")


def test_the_demo_proofs_are_there_and_named_after_their_files() -> None:
    names = [path.stem for path in PROOFS]
    assert {"demo", "fsdp2", "muon", "async", "accumulation", "prefetcher", "three-kills"} <= set(names)
    assert [load_proof(path).id for path in PROOFS] == names
    titles = [load_proof(path).title for path in PROOFS]
    assert len(set(titles)) == len(titles)


def test_the_launch_command_keeps_to_the_loopback_and_starts_every_rank() -> None:
    command = torchrun_command(ranks=4, port=20001, program=("-m", "some.trainer"), arguments=("a.yaml", "--b=c"))
    text = " ".join(command)
    assert "-m torch.distributed.run --nnodes 1 --nproc-per-node 4" in text
    assert "--master-addr 127.0.0.1 --master-port 20001 -m some.trainer a.yaml --b=c" in text


def test_free_ports_lie_below_the_ephemeral_range() -> None:
    assert all(20000 <= free_port() < 32000 for _ in range(20))
