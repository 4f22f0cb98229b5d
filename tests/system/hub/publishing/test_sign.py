"""Signatures made with `sigstore` and read by the unmodified client, both with a local Sigstore."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kernel_builder.hub.audit import audit
from kernel_builder.hub.signing import sign
from kernel_builder.hub.verification import verify
from kernel_format.errors import CheckError, PackageError, VerificationError
from kernel_format.signatures import key_bundle, read_private_key
from kernel_format.tree_digest import SIGNATURE
from tests.support.builder_process import run_builder
from tests.support.cli import expect
from tests.support.files import append
from tests.support.places import SOURCES
from tests.support.running_hub import RunningHub
from tests.support.torch_process import output_with_torch, run_with_torch

from . import sigstore_instance
from .conftest import build_for, edit
from .test_publish import CPU, CUDA, put

pytestmark = pytest.mark.attack

REPO = "kernels-community/python-only"
TRUSTED = (
    "huggingface/kernels-community",
    "huggingface/kernels-community/.github/workflows/build.yaml@refs/heads/main",
)
OURS = ("org/kernels", "org/kernels/.github/workflows/release.yml@refs/tags/v1.0")


def client_verdict(hub: RunningHub, trust: str) -> tuple[int, str]:
    """Return the exit status and output of `kernels verify-signature` with the given roots of trust."""
    code = SOURCES["verify_by_client"].format(trust=trust, REPO=REPO)
    done = run_with_torch(code, **hub.environment)
    return done.returncode, done.stdout + done.stderr


def test_the_client_accepts_signatures_of_continuous_integration(
    hub: RunningHub, doubling: Path, sigstore: sigstore_instance.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = sorted((doubling / "build").iterdir())
    build_for(doubling, REPO)
    for name, value in sigstore.job_of(*TRUSTED).items():
        monkeypatch.setenv(name, value)
    assert sign(packages).signed == (CPU, CUDA)
    digest = base64.b64encode(hashlib.sha256((packages[0] / "metadata.json").read_bytes()).digest()).decode()
    (packages[0] / SIGNATURE).write_text(json.dumps({"messageSignature": {"messageDigest": {"digest": digest}}}))
    assert sign(packages).signed == (CPU, CUDA)  # the forged signature is replaced
    put(hub, doubling, REPO)
    report = verify(REPO, endpoint=hub.url, require_signature=True)
    assert [(verdict.signature, verdict.ok) for verdict in report.variants] == [("valid", True)] * 2
    status, output = client_verdict(hub, sigstore.trust)
    assert status == 0 and output.count("kernel metadata is correctly signed") == 2, output
    untrusted = verify(REPO, endpoint=hub.url, signers=[f"https://github.com/{OURS[1]}"])
    assert not untrusted.ok and "policies" in untrusted.variants[0].signature


def test_signatures_of_other_workflows_or_other_metadata_are_rejected(
    hub: RunningHub, doubling: Path, sigstore: sigstore_instance.Running
) -> None:
    packages = sorted((doubling / "build").iterdir())
    build_for(doubling, REPO)
    signed = expect(0, "", "sign", doubling, env={"SIGSTORE_ID_TOKEN": sigstore_instance.token(*OURS)})
    assert signed.output.count("signed ") == 2, signed.output
    signature = (packages[1] / "metadata.json.sigstore").read_bytes()
    put(hub, doubling, REPO)
    assert not verify(REPO, endpoint=hub.url).ok  # the client does not trust this workflow
    signer = f"https://github.com/{OURS[1]}"
    assert verify(REPO, endpoint=hub.url, signers=[signer], require_signature=True).ok
    status, output = client_verdict(hub, sigstore.trust)
    assert status == 1 and output.count("metadata signature verification failed") == 2, output

    edit(packages[1], "_ops.py", "Return the", "Returns the")
    (packages[1] / "metadata.json.sigstore").write_bytes(signature)
    put(hub, doubling, REPO)
    accepted, rejected = verify(REPO, endpoint=hub.url, signers=[signer]).variants
    assert (accepted.ok, rejected.ok, rejected.digest) == (True, False, ()) and "mismatch" in rejected.signature


def test_without_an_identity_provider_nothing_is_signed(no_identity: None, doubling: Path) -> None:
    build_for(doubling, REPO)
    packages = sorted((doubling / "build").iterdir())
    with pytest.raises(VerificationError, match="this machine has no identity provider"):
        sign(packages)
    with pytest.raises(VerificationError, match="cannot read the identity token"):
        sign(packages, identity_token="not a token")
    assert not list(doubling.rglob("*.sigstore"))
    append(packages[0] / "_ops.py", "# tampered\n")
    with pytest.raises(CheckError, match=r"_ops.py has another SHA-256"):
        sign(packages)


def make_key(directory: Path, name: str, *command: str, passphrase: str = "") -> Path:
    """Make a key by OpenSSH, or by another command that writes a private key to standard output."""
    key = directory / name
    if command:
        key.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        public = ["openssl", "pkey", "-in", str(key), "-pubout", "-out", f"{key}.pub"]
        subprocess.run([*public, "-passin", f"pass:{passphrase}"], check=True, capture_output=True)
    else:
        if shutil.which("ssh-keygen") is None:
            pytest.skip("ssh-keygen is not installed: apt-get install openssh-client")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return key


OPENSSL = ("openssl", "genpkey", "-algorithm", "ed25519")


def signed_by(project: Path, key: Path, given: str | None = None) -> str:
    return expect(0, "", "sign", project, "--key", key, input=given).output


def test_a_users_key_signs_without_a_network(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    """Verified by its public key alone; the client loads the package, and says that it cannot check the signature."""
    key, other = make_key(tmp_path, "signing"), make_key(tmp_path, "other", *OPENSSL)
    build_for(doubling, REPO)
    assert signed_by(doubling, other).count("signed ") == 2
    assert signed_by(doubling, key).count("signed ") == 2  # the key that was asked for replaces the other one
    put(hub, doubling, REPO)

    def verdicts(*signers: str) -> set[str]:
        return {verdict.signature for verdict in verify(REPO, endpoint=hub.url, signers=signers).variants}

    assert verdicts(f"{key}.pub") == verdicts(f"{other}.pub", f"{key}.pub") == {"valid"}
    assert verdicts(f"{other}.pub") == {"not by one of the trusted keys, or of another metadata.json"}
    api = hub.api()
    for copied, branch, variant in (("other/copy", "v1", CPU), (REPO, "v2", CPU), ("other/renamed", "v1", CUDA)):
        api.create_repo(copied, repo_type="kernel", exist_ok=True)
        api.create_branch(copied, branch=branch, repo_type="kernel")
        place = {"repo_id": copied, "revision": branch, "repo_type": "kernel"}
        api.upload_folder(folder_path=doubling / "build" / CPU, path_in_repo=f"build/{variant}", **place)
        found = verify(f"{copied}@{branch}", endpoint=hub.url, signers=[f"{key}.pub"]).variants
        assert {v.signature for v in found if v.variant == variant} == {f"valid for another place: {REPO} v1 {CPU}"}
    api.delete_branch(REPO, branch="v2", repo_type="kernel")
    api.create_branch(REPO, branch="v2", revision="v1", repo_type="kernel")  # an old version as the newest
    of = {name: verify(name, endpoint=hub.url, signers=[f"{key}.pub"]) for name in (REPO, f"{REPO}@v2", f"{REPO}@v1")}
    (commit,) = {result.revision for result in of.values()}
    for name in (REPO, f"{REPO}@v2", f"{REPO}@{commit}"):
        found = verify(name, endpoint=hub.url, signers=[f"{key}.pub"]).variants
        assert all(verdict.signature.startswith("valid for another place") for verdict in found)
    assert of[f"{REPO}@v1"].ok
    api.delete_branch(REPO, branch="v2", repo_type="kernel")
    api.create_tag(REPO, tag="v2", revision="v1", repo_type="kernel")
    for revision in ("v2", "refs/tags/v2"):
        found = verify(f"{REPO}@{revision}", endpoint=hub.url, signers=[f"{key}.pub"]).variants
        assert all(verdict.signature.startswith("valid for another place") for verdict in found)
    without_key = verify(REPO, endpoint=hub.url)
    assert verdicts() == {"not verified: by a key; name the signer's public key with --signer"}
    assert (without_key.ok, without_key.is_verified, without_key.as_dict()["ok"]) == (True, False, False)
    assert not verify(REPO, endpoint=hub.url, require_signature=True).ok
    environment = {**hub.environment, "HTTPS_PROXY": "http://127.0.0.1:9"}  # no Sigstore
    done = run_builder(environment, "verify", REPO, "--signer", f"{key}.pub", "--require-signature")
    assert done.returncode == 0 and done.stdout.count("signature   valid") == 2, done.stdout + done.stderr

    status, output = client_verdict(hub, "{}")
    assert status == 1 and output.count("expected certificate in bundle") == 2, output
    code = f"import kernels, torch; print(kernels.get_kernel('{REPO}', version=1, trust_remote_code=True))"
    output_with_torch(code, **hub.environment)

    edit(doubling / "build" / CPU, "_ops.py", "Return the", "Returns the")
    (doubling / "build" / CPU / SIGNATURE).write_bytes((doubling / "build" / CUDA / SIGNATURE).read_bytes())
    put(hub, doubling, REPO)
    assert verdicts(f"{key}.pub") == {"valid", "not by one of the trusted keys, or of another metadata.json"}


def test_a_signature_for_no_repository_verifies_for_none(hub: RunningHub, quick: Path, tmp_path: Path) -> None:
    key, package = make_key(tmp_path, "signing", *OPENSSL), quick / "build" / CUDA
    with pytest.raises(CheckError, match="built for no repository"):
        sign([package], key=read_private_key(key, str))
    text = (package / "metadata.json").read_text()
    hub.api().create_repo(REPO, repo_type="kernel")
    for number, (old, new) in enumerate([('"repo-id": null', '"repo-id": null'), ('"built-for"', '"other"')], 1):
        (package / "metadata.json").write_text(text.replace(old, new))
        bundle = key_bundle((package / "metadata.json").read_bytes(), read_private_key(key, str))
        (package / SIGNATURE).write_text(bundle)
        branch = f"v{number}"
        hub.api().create_branch(REPO, branch=branch, repo_type="kernel")
        place = {"repo_id": REPO, "revision": branch, "repo_type": "kernel"}
        hub.api().upload_folder(folder_path=quick / "build", path_in_repo="build", **place)
        for found in (verify, audit):
            (verdict,) = found(f"{REPO}@{branch}", endpoint=hub.url, signers=[f"{key}.pub"]).variants
            assert verdict.signature == "not verified: signed for no repository"
        assert verify(f"{REPO}@{branch}", endpoint=hub.url, signers=[f"{key}.pub"]).as_dict()["ok"] is False
    (package / "metadata.json").write_text(text)
    with pytest.raises(PackageError, match="`built-for` is None"):
        put(hub, quick, REPO)


def test_openssl_checks_the_signature_of_a_key(doubling: Path, tmp_path: Path) -> None:
    build_for(doubling, REPO)
    key = make_key(tmp_path, "signing", *OPENSSL, "-aes256", "-pass", "pass:secret", passphrase="secret")
    signed_by(doubling, key, "secret\n")
    package = doubling / "build" / CPU
    bundle = json.loads((package / SIGNATURE).read_text())
    (tmp_path / "signature").write_bytes(base64.b64decode(bundle["messageSignature"]["signature"]))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", f"{key}.pub"]
    command += ["-sigfile", str(tmp_path / "signature"), "-in", str(package / "metadata.json")]
    subprocess.run(command, check=True)


def test_invalid_keys_are_reported(doubling: Path, tmp_path: Path) -> None:
    locked = make_key(tmp_path, "locked", *OPENSSL, "-aes256", "-pass", "pass:secret", passphrase="secret")
    rsa = make_key(tmp_path, "rsa", "openssl", "genpkey", "-algorithm", "RSA")
    for key, given, message in (
        (tmp_path / "none", None, "the key cannot be read: No such file"),
        (locked, "wrong\n", "the passphrase is wrong"),
        (rsa, None, "expected a key of Ed25519"),
        (Path(f"{locked}.pub"), None, "the private key cannot be read"),
    ):
        expect(10, message, "sign", doubling, "--key", key, input=given)
    assert not list(doubling.rglob("*.sigstore"))
    for signer, message in ((locked, "is a private key"), (tmp_path / "none", "nor a file with a public key")):
        expect(10, message, "verify", REPO, "--signer", signer)
