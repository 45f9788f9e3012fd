"""A real nginx in front of a hub, run with the very file that the documentation shows."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTED = ROOT / "deploy" / "nginx.conf"

MAIN = """
user root;
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/atoll.conf;
}}
"""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for this machine that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "hub.pem", folder / "hub.key"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pem, private


class Nginx:
    """Serves `https://localhost:PORT/atoll/`."""

    def __init__(self, folder: Path, *, port: int, hub_port: int, strips: bool = True) -> None:
        """Change the documented file where it says so, and nowhere else."""
        self.port = port
        self.certificate, key = make_certificate(folder)
        text = DOCUMENTED.read_text()
        for old, new in (
            ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
            ("server_name hub.example.org;", "server_name localhost;"),
            ("/etc/ssl/certs/hub.example.org.pem", str(self.certificate)),
            ("/etc/ssl/private/hub.example.org.key", str(key)),
            ("http://127.0.0.1:7700/;", f"http://127.0.0.1:{hub_port}{'/' if strips else ''};"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "atoll.conf").write_text(text)
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
        self._folder = folder
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        self._popen = subprocess.Popen(
            [program, "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while True:
            assert self._popen.poll() is None, (self._folder / "error.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return self
            except ConnectionRefusedError:
                continue

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._popen is not None
        self._popen.terminate()
        self._popen.wait(PATIENCE_S)

    @property
    def requests(self) -> list[str]:
        """What it has answered, a line each."""
        return (self._folder / "access.log").read_text().splitlines()
