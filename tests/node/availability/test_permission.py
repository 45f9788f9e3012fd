"""The second lock: what an owner does not allow is refused, whatever the hub sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.cli.commands import sign
from atoll.code.packing import pack
from atoll.config import JobSpec, JobTable, LaunchTable, parse_spec
from atoll.errors import AtollError, ConfigError, NotAllowed
from atoll.node.availability.quiet_hours import check_allowed
from atoll.node.identity.image_signatures import load_key, make_key, pinned_code, sign_image
from atoll.node.launchers.launcher import parse_mounts
from atoll.wire.messages import Offer
from tests.node.agent.lone_agent import launch, lone_agent, program
from tests.node.launchers.ordering import run

PINNED = f"registry/image@sha256:{'ab' * 32}"


def container(image: str = "image:1", **table: Any) -> JobSpec:
    return JobSpec(launch=LaunchTable(launcher="container", image=image, **table))


JOBS = {
    "trainer": JobSpec(),
    "script": JobSpec(job=JobTable(script="s.py")),
    "command": JobSpec(job=JobTable(command=["true"])),
    "container": container(),
    "rl": parse_spec('[[rl.policies]]\nname = "one"\nenv = "CartPole-v1"'),
}


@pytest.mark.parametrize("kind", JOBS)
def test_each_kind_runs_where_it_is_allowed_and_nowhere_else(kind: str) -> None:
    check_allowed(JOBS[kind], member="w0", offer=Offer(kinds=[kind]))
    others = [other for other in JOBS if other != kind]
    with pytest.raises(NotAllowed, match=kind):
        check_allowed(JOBS[kind], member="w0", offer=Offer(kinds=others))


OUR_OWN = ("CartPole-v1", "text:sums", "atoll.rl.environments.physics:cartpole")
FOREIGN = (
    "theirs:make", "theirs:Env-v0", "text:os:system", "text:theirs:make", "atoll.system:subprocess",
    "atoll.rl.environments.film:record", "text:atoll.system:lower_priority",
)  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN)
def test_environments_of_somebodys_own_need_what_scripts_need(foreign: str) -> None:
    """Tasks for language models, too; a function of Atoll is none unless it is meant for that."""
    policies = '[[rl.policies]]\nname = "one"\nenv = "{}"\n'
    plain, own = (parse_spec(policies.format(env)) for env in ("CartPole-v1", foreign))
    for env in OUR_OWN:
        assert parse_spec(policies.format(env)).permission == "rl"
    packed = parse_spec('[job]\ncode = "sha256:0"\n' + policies.format("CartPole-v1"))
    assert plain.permission == "rl"
    for spec in (own, packed):
        check_allowed(spec, member="w0", offer=Offer(kinds=["script"]))
        with pytest.raises(NotAllowed, match="script"):
            check_allowed(spec, member="w0", offer=Offer(kinds=["rl"]))


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "PATH", "CXX", "NCCL_NET_PLUGIN"])
@pytest.mark.parametrize("kind", ["trainer", "rl"])
def test_variables_that_load_code_need_what_scripts_need(kind: str, name: str) -> None:
    own = dataclasses.replace(JOBS[kind], launch=LaunchTable(env=[f"{name}=."]))
    check_allowed(own, member="w0", offer=Offer(kinds=["script"]))
    with pytest.raises(NotAllowed, match="script"):
        check_allowed(own, member="w0", offer=Offer(kinds=["trainer", "rl"]))
    harmless = LaunchTable(env=["OMP_NUM_THREADS=2", "WANDB_API_KEY=x"])
    assert dataclasses.replace(JOBS[kind], launch=harmless).permission == kind


def test_reducer_is_atolls_own_program_and_runs_everywhere() -> None:
    check_allowed(JOBS["script"], member="reducer", offer=Offer(kinds=[]))


def test_agent_starts_nothing_that_its_owner_does_not_allow(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            await agent.set_offer(Offer(kinds=["container", "trainer"]))
            hub.put(launch(program("touch", str(tmp_path / "harm"))))
            end = await hub.ended()
            assert end.exit_code == 1
            assert end.error is not None
            assert end.error["kind"] == "NotAllowed"

    run(scenario())
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("job", "member"),
    [("../../x", "w0"), ("job", "../w0"), ("job", "reducer-x/../../.."), ("/tmp/x", "w0")],
)
def test_no_name_of_a_job_or_member_leads_out_of_its_folder(
    tmp_path: Path, job: str, member: str
) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path / "a" / "b") as (agent, hub):
            await agent.set_offer(Offer(kinds=["trainer"]))
            hub.put(
                msgspec.structs.replace(
                    launch(JobSpec()), job=job, member=member, files={"harm": "x"}
                )
            )
            end = await hub.ended(member)
            assert end.error is not None
            assert "cannot be used as a name" in end.error["what"]

    run(scenario())
    assert not [path for path in tmp_path.rglob("harm") if path.is_file()]
    assert not Path("/tmp/x/harm").exists()


# ------------------------------------------------------------------------------------- mounts


def test_no_mount_is_allowed_unless_the_owner_lists_it(tmp_path: Path) -> None:
    with pytest.raises(NotAllowed, match="no mounts at all"):
        check_allowed(container(mounts=[f"{tmp_path}:/data"]), member="w0", offer=Offer())


def test_subfolder_of_a_listed_folder_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "data" / "set").mkdir(parents=True)
    offer = Offer(mounts=[str(tmp_path / "data")])
    spec = container(mounts=[f"{tmp_path}/data/set:/data:ro"])
    (mount,) = check_allowed(spec, member="w0", offer=offer)
    assert (mount.source, mount.target, mount.read_only) == (tmp_path / "data/set", "/data", True)


@pytest.mark.parametrize(
    "wanted",
    [
        "{tmp}/data/../secret:/x",
        "{tmp}/data/link:/x",
        "{tmp}/database:/x",
        "{tmp}/data/absent:/x",
        "{tmp}:/x",
        "/:/x",
        "data:/x",
        "{tmp}/data:x",
        "{tmp}/data:/x/../../etc",
        "{tmp}/data:/",
        "{tmp}/data",
        "{tmp}/data:/x:exec",
        "{tmp}/data:/x:ro:rw",
        "",
    ],
)
def test_no_way_leads_out_of_the_folders_that_are_listed(tmp_path: Path, wanted: str) -> None:
    for name in ("data", "database", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    text = wanted.format(tmp=tmp_path)
    with pytest.raises((NotAllowed, ConfigError)):
        parse_mounts([text], allowed=[str(tmp_path / "data")])


def test_folder_listed_for_reading_is_not_given_for_writing(tmp_path: Path) -> None:
    allowed = [f"{tmp_path}:ro"]
    assert parse_mounts([f"{tmp_path}:/x:ro"], allowed=allowed)[0].read_only
    with pytest.raises(NotAllowed):
        parse_mounts([f"{tmp_path}:/x"], allowed=allowed)


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(launch=LaunchTable(mounts=["/tmp:/data"])),
        JobSpec(
            job=JobTable(requirements="r.txt"),
            launch=LaunchTable(launcher="container", image="i:1"),
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(spec: JobSpec) -> None:
    with pytest.raises(ConfigError):
        check_allowed(spec, member="w0", offer=Offer(mounts=["/"]))


# ----------------------------------------------------------------------------- signed images


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[str, Path]]:
    """Public key and file of two people."""
    made = {}
    for name in ("anna", "ben"):
        path = tmp_path / f"{name}.key"
        made[name] = (make_key(path), path)
    return made


def refusal(spec: JobSpec, *, trusted: list[str], kinds: list[str] | None = None) -> AtollError:
    offer = Offer(kinds=kinds or ["signed"])
    with pytest.raises(NotAllowed) as refused:
        check_allowed(spec, member="w0", offer=offer, trusted_keys=trusted)
    return refused.value


def test_image_that_a_trusted_key_has_signed_runs(keys: dict[str, tuple[str, Path]]) -> None:
    public, path = keys["anna"]
    spec = container(PINNED, signature=sign_image(PINNED, key=load_key(path)))
    offer = Offer(kinds=["signed"])
    trusted = [keys["ben"][0], public]
    check_allowed(spec, member="w0", offer=offer, trusted_keys=trusted)


def test_every_other_image_is_refused(keys: dict[str, tuple[str, Path]]) -> None:
    public, path = keys["anna"]
    signature = sign_image(PINNED, key=load_key(path))
    other = PINNED.replace("ab", "cd")
    tampered = signature[:10] + ("A" if signature[10] != "A" else "B") + signature[11:]
    for spec in (
        container(other, signature=signature),
        container(PINNED, signature=tampered),
        container(PINNED, signature="no base64 at all"),
        container(PINNED),
    ):
        refusal(spec, trusted=[public])
    refusal(container(PINNED, signature=signature), trusted=[keys["ben"][0]])
    assert "listed none" in str(refusal(container(PINNED, signature=signature), trusted=[]))


@pytest.mark.parametrize("image", ["image:1", "image", PINNED[:-1], PINNED.upper(), PINNED + "\n"])
def test_unpinned_image_is_refused_and_unsignable(
    keys: dict[str, tuple[str, Path]], image: str
) -> None:
    public, path = keys["anna"]
    assert "pinned" in str(refusal(container(image, signature="x"), trusted=[public]))
    with pytest.raises(ConfigError, match="not pinned"):
        sign_image(image, key=load_key(path))


def test_owner_of_signed_images_only_gets_no_other_kind(keys: dict[str, tuple[str, Path]]) -> None:
    refusal(JOBS["script"], trusted=[keys["anna"][0]])


def test_key_is_its_owners_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="cannot be written"):
        make_key(tmp_path / "key")


def test_text_that_is_no_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="not valid"):
        check_allowed(
            container(PINNED), member="w0", offer=Offer(kinds=["signed"]), trusted_keys=["rsa:x"]
        )


# ------------------------------------------------------------------------------- signed code

CODE = "sha256:" + "ef" * 32


def script(signature: str = "", **job: Any) -> JobSpec:
    table = JobTable(**{"script": "train.py", "code": CODE, **job})
    return JobSpec(job=table, launch=LaunchTable(signature=signature))


def test_code_that_a_trusted_key_has_signed_runs(keys: dict[str, tuple[str, Path]]) -> None:
    public, path = keys["anna"]
    signature = sign_image(pinned_code(CODE), key=load_key(path))
    offer = Offer(kinds=["signed"])
    spec = script(signature, args=["--lr", "1"])
    check_allowed(spec, member="w0", offer=offer, trusted_keys=[public])
    for wrong in (
        script(),
        script(signature, code="sha256:" + "00" * 32),
        script(signature, code=""),
        script(signature, script="../beside.py"),
        script(signature, script="/etc/rc.local"),
        dataclasses.replace(spec, launch=dataclasses.replace(spec.launch, env=["PYTHONPATH=/tmp"])),
    ):
        refusal(wrong, trusted=[public])
    refusal(spec, trusted=[keys["ben"][0]])
    refusal(spec, trusted=[public], kinds=["trainer", "container"])


def test_signature_of_the_command_line_fits_the_pack(
    tmp_path: Path, keys: dict[str, tuple[str, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)")
    public, path = keys["anna"]
    sign.code(folder, key=path)
    signature = capsys.readouterr().out.partition('signature = "')[2].partition('"')[0]
    with pack(folder) as packed:
        spec = script(signature, code=f"sha256:{packed.sha256}")
    check_allowed(spec, member="w0", offer=Offer(kinds=["signed"]), trusted_keys=[public])
