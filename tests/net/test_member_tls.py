"""Encrypted lines: only those who know the secret, and nothing changed, repeated or read."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AtollError, AuthError, WireError
from atoll.net.member_tls import (
    PIECE_BYTES,
    MemberKey,
    MemberTls,
    SecureLine,
    check_server,
    client_context,
    server_context,
)
from atoll.system import allow_many_files
from tests.patience import PATIENCE_S

SECRET = b"of this job"
ONE, TWO = MemberTls(SECRET, name="w0"), MemberTls(SECRET, name="w1")


@contextlib.contextmanager
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.settimeout(PATIENCE_S)
        yield near, far


def met(
    near: socket.socket, far: socket.socket, listening: MemberTls = ONE, dialling: MemberTls = TWO
) -> tuple[SecureLine | BaseException, SecureLine | BaseException]:
    """Return what both sides of a handshake get."""
    found: list[SecureLine | BaseException] = []

    def listen() -> None:
        try:
            found.append(listening.listening(near))
        except (OSError, AtollError) as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        other: SecureLine | BaseException = dialling.dialling(far)
    except (OSError, AtollError) as error:
        other = error
    thread.join(PATIENCE_S)
    return found[0], other


def lines(near: socket.socket, far: socket.socket) -> tuple[SecureLine, SecureLine]:
    one, two = met(near, far)
    assert isinstance(one, SecureLine)
    assert isinstance(two, SecureLine)
    return one, two


def test_both_sides_learn_name_and_key_of_the_other() -> None:
    with ends() as (near, far):
        one, two = lines(near, far)
        assert (one.peer, one.fingerprint) == ("w1", TWO.fingerprint)
        assert (two.peer, two.fingerprint) == ("w0", ONE.fingerprint)
        assert ONE.fingerprint != TWO.fingerprint


def test_who_does_not_know_the_secret_is_refused_either_way() -> None:
    stranger = MemberTls(b"of another job", name="w1")
    with ends() as (near, far):
        for found in met(near, far, dialling=stranger):
            assert isinstance(found, AuthError)
    with ends() as (near, far):
        for found in met(near, far, listening=stranger):
            assert isinstance(found, AuthError)
    with pytest.raises(AuthError, match="no secret"):
        MemberTls(b"", name="w0")


def test_another_member_than_the_dialled_one_is_refused() -> None:
    with ends() as (near, far):
        thread = threading.Thread(target=ONE.listening, args=[near])
        thread.start()
        with pytest.raises(AuthError, match="another process answers"):
            TWO.dialling(far, to="w7")
        thread.join(PATIENCE_S)


def test_one_thread_sends_while_another_one_receives() -> None:
    data = os.urandom(20 * PIECE_BYTES + 7)
    with ends() as (near, far):
        pair = lines(near, far)
        got = [bytearray(len(data)) for _ in pair]
        threads = [threading.Thread(target=line.write, args=[data]) for line in pair]
        threads += [
            threading.Thread(target=line.read_into, args=[memoryview(target)])
            for line, target in zip(pair, got, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert got == [data, data]


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_messages_come_in_order_or_not_at_all(bodies: list[bytes], data: st.DataObject) -> None:
    with ends() as (near, far):
        one, two = lines(near, far)
        for body in bodies:
            two.send(body)
            assert one.receive(most=50) == body
            one.send(body[::-1])
            assert two.receive(most=50) == body[::-1]
        two.send(b"the last one")
        sent = bytearray(near.recv(4096))
        assert b"the last one" not in sent
        flipped = data.draw(st.integers(5, len(sent) - 1))  # a record's head says its length
        sent[flipped] ^= 1 << data.draw(st.integers(0, 7))
        far.sendall(sent)
        with pytest.raises(OSError, match=r"(?i)bad record mac|decryption"):
            one.receive(most=50)


@pytest.mark.parametrize("what", ["repeated", "swapped"])
def test_records_cannot_be_repeated_or_swapped(what: str) -> None:
    with ends() as (near, far):
        one, two = lines(near, far)
        records = []
        for body in (b"first", b"other"):
            two.send(body)
            records.append(near.recv(4096))
        far.sendall(b"".join([records[0], records[0]] if what == "repeated" else records[::-1]))
        with pytest.raises(OSError, match=r"(?i)bad record mac|decryption"):
            assert one.receive(most=50) == b"first" == one.receive(most=50)


def test_a_recorded_connection_is_of_no_use_again() -> None:
    recorded = bytearray()
    with ends() as (near, middle), ends() as (behind, far):
        for source, target, keep in ((middle, behind, False), (behind, middle, True)):
            threading.Thread(
                target=_pass_on, args=(source, target, recorded if keep else None), daemon=True
            ).start()
        one, two = lines(near, far)
        two.send(b"once")
        assert one.receive(most=50) == b"once"
    with ends() as (near, far):
        far.sendall(recorded)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, AuthError)):
            ONE.listening(near)


def _pass_on(source: socket.socket, target: socket.socket, recorded: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            if recorded is not None:
                recorded += data
            target.sendall(data)


def test_what_is_no_tls_and_what_is_too_long_is_refused() -> None:
    with ends() as (near, far):
        far.sendall(b"\x00" * 100)
        with pytest.raises(AuthError):
            ONE.listening(near)
    with ends() as (near, far):
        one, two = lines(near, far)
        two.send(bytes(100))
        with pytest.raises(WireError, match="too long"):
            one.receive(most=99)


def test_waiting_sees_what_has_already_been_read() -> None:
    with ends() as (near, far):
        one, two = lines(near, far)
        assert not one.wait(0.0)
        two.send(b"first")
        two.send(b"second")
        assert one.wait(PATIENCE_S)
        assert one.receive(most=10) == b"first"
        assert one.wait(PATIENCE_S)
        assert one.receive(most=10) == b"second"
        assert not one.wait(0.0)


def test_a_server_is_known_by_the_fingerprint_of_its_key() -> None:
    key, other = MemberKey(), MemberKey()
    with ends() as (near, far):

        def serve() -> None:
            with server_context(key).wrap_socket(near, server_side=True) as line:
                line.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with client_context().wrap_socket(far) as line:
            check_server(line, key.fingerprint)
            with pytest.raises(AuthError, match="another process answers"):
                check_server(line, other.fingerprint)
        thread.join(PATIENCE_S)


def test_a_line_with_a_high_file_number_is_waited_for() -> None:
    fcntl = pytest.importorskip("fcntl")  # select(2) takes numbers below 1024 only
    allow_many_files(4096)
    with ends() as (near, far):
        try:
            high = socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 2000))
        except OSError:
            pytest.skip("this system does not allow so many files")
        with high:
            one, two = met(high, far)
            assert isinstance(one, SecureLine)
            assert isinstance(two, SecureLine)
            assert not one.wait(0.0)
            two.send(b"hello")
            assert one.wait(PATIENCE_S)
