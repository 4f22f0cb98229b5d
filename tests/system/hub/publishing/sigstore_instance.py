"""A Sigstore instance for tests: a certificate authority, the two logs, and the roots of trust that name them.

It speaks the protocol of the public instance and signs in the same way: certificates for the identity in a token, with
a timestamp of the certificate log, and entries of the signature log with a promise, a proof and a checkpoint. Unlike
the public instance it accepts any token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from tests.support.loopback import QuietHandler, served

GITHUB = "https://token.actions.githubusercontent.com"
_SHA256 = ec.ECDSA(hashes.SHA256())
_OF_FULCIO = "1.3.6.1.4.1.57264.1."
_TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def token(repository: str, workflow: str) -> str:
    """Return an unsigned identity token like the one that GitHub gives to a workflow's job."""
    claims = {"iss": GITHUB, "aud": "sigstore", "sub": workflow, "repository": repository, "job_workflow_ref": workflow}
    now = int(time.time())
    parts = ({"alg": "RS256", "typ": "JWT"}, {**claims, "iat": now, "nbf": now - 60, "exp": now + 600})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, "c2ln"])


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _text(value: str) -> bytes:
    """Encode a text of less than 256 bytes as a DER UTF8String."""
    data = value.encode()
    return (b"\x0c" + (bytes([len(data)]) if len(data) < 128 else b"\x81" + bytes([len(data)]))) + data


class Instance:
    """The keys of the instance, and the answers that are signed with them."""

    def __init__(self) -> None:
        self._authority, self._certificates, self._signatures = (ec.generate_private_key(ec.SECP256R1()) for _ in "123")
        name = x509.Name(
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tests"), x509.NameAttribute(NameOID.COMMON_NAME, "root")]
        )
        usage = {"key_cert_sign": True, "crl_sign": True}
        self._root = (
            self._certificate(name, self._authority.public_key(), timedelta(days=1), usage)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._authority.public_key()), critical=False)
            .sign(self._authority, hashes.SHA256())
        )

    def _certificate(
        self, name: x509.Name, key: Any, lives: timedelta, usage: dict[str, bool]
    ) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        uses = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        uses += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + lives)
            .add_extension(x509.KeyUsage(**{use: usage.get(use, False) for use in uses}), critical=True)
        )

    def certificate(self, request: dict[str, Any], sent: str) -> dict[str, Any]:
        """Return Fulcio's answer to a certificate request."""
        part = sent.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        workflow = f"https://github.com/{claims['job_workflow_ref']}"
        key = x509.load_pem_x509_csr(base64.b64decode(request["certificateSigningRequest"])).public_key()
        builder = (
            self._certificate(x509.Name([]), key, timedelta(minutes=10), {"digital_signature": True})
            .issuer_name(self._root.subject)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(workflow)]), critical=True)
        )
        for number, value in (
            (1, claims["iss"].encode()),
            (8, _text(claims["iss"])),
            (9, _text(workflow)),
            (12, _text(f"https://github.com/{claims['repository']}")),
        ):
            unknown = x509.UnrecognizedExtension(ObjectIdentifier(f"{_OF_FULCIO}{number}"), value)
            builder = builder.add_extension(unknown, critical=False)
        without = builder.sign(self._authority, hashes.SHA256()).tbs_certificate_bytes
        timestamps = x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamp(without))
        leaf = builder.add_extension(timestamps, critical=False).sign(self._authority, hashes.SHA256())
        chain = [signed.public_bytes(Encoding.PEM).decode() for signed in (leaf, self._root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}

    def _timestamp(self, certificate: bytes) -> bytes:
        """Return the certificate log's signed timestamp (RFC 6962, 3.2), as the list that a certificate embeds."""
        now = int(time.time() * 1000)
        issuer = hashlib.sha256(_public(self._authority)).digest()
        entry = issuer + len(certificate).to_bytes(3, "big") + certificate
        signature = self._certificates.sign(struct.pack("!BBQH", 0, 0, now, 1) + entry + b"\0\0", _SHA256)
        log = hashlib.sha256(_public(self._certificates)).digest()
        timestamp = b"\0" + log + struct.pack("!QH", now, 0) + b"\4\3" + struct.pack("!H", len(signature)) + signature
        listed = struct.pack("!HH", len(timestamp) + 2, len(timestamp)) + timestamp
        return b"\x04" + (b"\x81" if len(listed) > 127 else b"") + bytes([len(listed)]) + listed

    def entry(self, proposed: dict[str, Any]) -> dict[str, Any]:
        """Return Rekor's answer to a new entry. Every entry is the only one of its tree."""
        body = json.dumps(proposed, sort_keys=True, separators=(",", ":")).encode()
        log = hashlib.sha256(_public(self._signatures)).hexdigest()
        entry = {"body": _base64(body), "integratedTime": int(time.time()), "logID": log, "logIndex": 0}
        promised = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        root = hashlib.sha256(b"\0" + body)
        note = f"tests\n1\n{_base64(root.digest())}\n"
        signed = _base64(bytes.fromhex(log)[:4] + self._signatures.sign(note.encode(), _SHA256))
        verification = {
            "signedEntryTimestamp": _base64(self._signatures.sign(promised, _SHA256)),
            "inclusionProof": {
                "checkpoint": f"{note}\n\u2014 tests {signed}\n",
                "hashes": [],
                "logIndex": 0,
                "rootHash": root.hexdigest(),
                "treeSize": 1,
            },
        }
        return {root.hexdigest(): {**entry, "verification": verification}}

    def trust(self, url: str) -> str:
        """Return the trust configuration for `sigstore`: the roots of trust and the addresses of the services."""
        signatures, certificates = map(_public, (self._signatures, self._certificates))
        values = {
            "url": url,
            "since": (datetime.now(timezone.utc) - timedelta(hours=1)).isoformat().replace("+00:00", "Z"),
            "root": _base64(self._root.public_bytes(Encoding.DER)),
            "signatures": _base64(signatures),
            "signatures_id": _base64(hashlib.sha256(signatures).digest()),
            "certificates": _base64(certificates),
            "certificates_id": _base64(hashlib.sha256(certificates).digest()),
        }
        return Template(Path(__file__).with_name("trust.json").read_text()).substitute(values)


@dataclass(frozen=True)
class Running:
    """A running instance: its address, and its trust configuration as JSON."""

    url: str
    trust: str

    def job_of(self, repository: str, workflow: str) -> dict[str, str]:
        """Return the environment variables by which a GitHub job gets its identity."""
        query = urlencode({"repository": repository, "workflow": workflow})
        return {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "any",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/token?{query}",
        }


@contextmanager
def running() -> Iterator[Running]:
    """Run an instance in the context."""
    instance = Instance()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            self.send_json(200, {"value": token(query["repository"][0], query["workflow"][0])})

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/v2/signingCert":
                answer = instance.certificate(sent, self.headers["Authorization"].removeprefix("Bearer "))
            else:
                answer = instance.entry(sent)
            self.send_json(200, answer)

    with served(Handler) as url:
        yield Running(url, instance.trust(url))
