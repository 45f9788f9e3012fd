"""SPAKE2 against the vectors of RFC 9382, and what strangers may send instead of a point."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AuthError, ConfigError, WireError
from atoll.wire.pairing import DIGITS, new_code, read_code, seal, side, unseal
from atoll.wire.spake2 import (
    KEY_BYTES,
    ORDER,
    G,
    Keys,
    Password,
    Side,
    added,
    decoded,
    encoded,
    multiplied,
    negated,
)

VECTORS = [
    # RFC 9382, appendix B: A, B, w, x, y, pA, pB, Ke, MAC of A, MAC of B
    (
        "server", "client",
        "2ee57912099d31560b3a44b1184b9b4866e904c49d12ac5042c97dca461b1a5f",
        "43dd0fd7215bdcb482879fca3220c6a968e66d70b1356cac18bb26c84a78d729",
        "dcb60106f276b02606d8ef0a328c02e4b629f84f89786af5befb0bc75b6e66be",
        "04a56fa807caaa53a4d28dbb9853b9815c61a411118a6fe516a8798434751470"
        "f9010153ac33d0d5f2047ffdb1a3e42c9b4e6be662766e1eeb4116988ede5f912c",
        "0406557e482bd03097ad0cbaa5df82115460d951e3451962f1eaf4367a420676"
        "d09857ccbc522686c83d1852abfa8ed6e4a1155cf8f1543ceca528afb591a1e0b7",
        "0e0672dc86f8e45565d338b0540abe69",
        "58ad4aa88e0b60d5061eb6b5dd93e80d9c4f00d127c65b3b35b1b5281fee38f0",
        "d3e2e547f1ae04f2dbdbf0fc4b79f8ecff2dff314b5d32fe9fcef2fb26dc459b",
    ),
    (
        "", "client",
        "0548d8729f730589e579b0475a582c1608138ddf7054b73b5381c7e883e2efae",
        "403abbe3b1b4b9ba17e3032849759d723939a27a27b9d921c500edde18ed654b",
        "903023b6598908936ea7c929bd761af6039577a9c3f9581064187c3049d87065",
        "04a897b769e681c62ac1c2357319a3d363f610839c4477720d24cbe32f5fd8"
        "5f44fb92ba966578c1b712be6962498834078262caa5b441ecfa9d4a9485720e918a",
        "04e0f816fd1c35e22065d5556215c097e799390d16661c386e0ecc84593974"
        "a61b881a8c82327687d0501862970c64565560cb5671f696048050ca66ca5f8cc7fc",
        "642f05c473c2cd79909f9a841e2f30a7",
        "47d29e6666af1b7dd450d571233085d7a9866e4d49d2645e2df975489521232b",
        "3313c5cefc361d27fb16847a91c2a73b766ffa90a4839122a9b70a2f6bd1d6df",
    ),
    (
        "", "",
        "7bf46c454b4c1b25799527d896508afd5fc62ef4ec59db1efb49113063d70cca",
        "8cef65df64bb2d0f83540c53632de911b5b24b3eab6cc74a97609fd659e95473",
        "d7a66f64074a84652d8d623a92e20c9675c61cb5b4f6a0063e4648a2fdc02d53",
        "04a65b367a3f613cf9f0654b1b28a1e3a8a40387956c8ba6063e8658563890f4"
        "6ca1ef6a676598889fc28de2950ab8120b79a5ef1ea4c9f44bc98f585634b46d66",
        "04589f13218822710d98d8b2123a079041052d9941b9cf88c6617ddb2fcc0494"
        "662eea8ba6b64692dc318250030c6af045cb738bc81ba35b043c3dcb46adf6f58d",
        "fc6374762ba5cf11f4b2caa08b2cd1b9",
        "dfb4db8d48ae5a675963ea5e6c19d98d4ea028d8e898dad96ea19a80ade95dca",
        "d0f0609d1613138d354f7e95f19fb556bf52d751947241e8c7118df5ef0ae175",
    ),
]  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS, ids=["both names", "one name", "no name"])
def test_both_sides_compute_the_vectors_of_the_rfc(vector: tuple[str, ...]) -> None:
    a, b, w, x, y, share_a, share_b, key, mac_a, mac_b = vector
    names = {"identity_a": a.encode(), "identity_b": b.encode()}
    one = Side(password=Password.of(int(w, 16)), is_a=True, secret=int(x, 16), **names)
    two = Side(password=Password.of(int(w, 16)), is_a=False, secret=int(y, 16), **names)
    assert (one.share().hex(), two.share().hex()) == (share_a, share_b)
    expected = Keys(bytes.fromhex(key), bytes.fromhex(mac_a), bytes.fromhex(mac_b))
    assert one.keys(one.share(), two.share()) == expected
    assert two.keys(two.share(), one.share()) == expected


def test_sides_with_different_codes_have_nothing_in_common() -> None:
    one, two = (
        side(Password.of_code("111-111"), is_joiner=True),
        side(Password.of(1), is_joiner=False),
    )
    ours, theirs = (one.keys(one.share(), two.share()), two.keys(two.share(), one.share()))
    assert ours.key != theirs.key
    assert ours.mac_a != theirs.mac_a
    with pytest.raises(AuthError, match="changed on its way"):
        unseal(seal("a ticket", theirs), ours)


def test_own_share_sent_back_gives_no_proof() -> None:
    one = side(Password.of_code("111-111"), is_joiner=True)
    keys = one.keys(one.share(), one.share())
    assert keys.mac_a != keys.mac_b


def test_an_exchange_multiplies_no_code() -> None:
    """Its time would tell something about the code to who starts many exchanges."""
    known = Password.of_code("111-111")
    without = dataclasses.replace(known, w=0)
    for is_a in (True, False):
        sides = [
            Side(password=each, is_a=is_a, identity_a=b"", identity_b=b"", secret=7)
            for each in (known, without)
        ]
        assert sides[0].share() == sides[1].share()


def test_the_group_has_its_order_and_inverses() -> None:
    assert multiplied(ORDER, G) is None
    assert multiplied(ORDER - 1, G) == negated(G)
    assert added(G, negated(G)) is None
    assert added(G, G) == multiplied(2, G)
    assert decoded(encoded(G)) == G


@given(st.binary(max_size=70) | st.binary(min_size=64, max_size=64).map(lambda b: b"\x04" + b))
def test_bytes_that_are_no_point_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="no point of the curve"):
        decoded(data)


def test_a_share_that_cancels_the_mask_is_refused() -> None:
    """The common point would be infinity, which everybody knows."""
    password = Password.of_code("111-111")
    one = side(password, is_joiner=True)
    mask = Side(password=password, is_a=False, identity_a=b"", identity_b=b"", secret=ORDER).share()
    with pytest.raises(WireError, match="forbidden"):
        one.keys(one.share(), mask)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_sealed_ticket_are_refused(data: bytes) -> None:
    with pytest.raises(AuthError):
        unseal(data, Keys(bytes(KEY_BYTES), b"", b""))


@given(st.text(max_size=20))
def test_only_six_digits_are_a_code(text: str) -> None:
    digits = "".join(letter for letter in text if letter in "0123456789")
    try:
        code = read_code(text)
    except ConfigError:
        return
    assert code.replace("-", "") == digits
    assert len(digits) == DIGITS


def test_codes_may_be_typed_with_spaces_or_without() -> None:
    code = new_code()
    assert read_code(f" {code.replace('-', ' ')} ") == read_code(code.replace("-", "")) == code
