"""What bench/suite.py compares this library with. A library's kernel is a class with one interface, `Peer`; it imports what it needs when
it is made, so whatever is not installed is a line that says so.
"""
import dataclasses
import importlib
import typing

from peers.rows import Form, Row


class Refused(Exception):
    """A peer does not run a row; the text says why."""


@dataclasses.dataclass
class Prepared:
    """`call(i)` computes copy i: [tokens, Hq, dv] in any shape that reshapes to it, a list of its parts, or on a CPU a function that makes
    these of what the library gave. `plan()`: what the host must do again when a length changes; it is timed apart."""

    call: typing.Callable
    plan: typing.Callable | None = None
    first_call_plans: bool = False


class Peer:
    """One kernel of one library on one device. The constructor raises ImportError where the library is missing or does not run.

    name: as --peers knows it. impl: "package-version/kernel", as result files have it. devices, dtypes, features, narrow_values: what it takes.
    """

    name: str
    impl: str
    devices: tuple = ("cuda",)
    dtypes: tuple = ("fp16", "bf16")
    kv_dtypes: tuple = ()  # beside the queries' own
    features: tuple = ()
    narrow_values: bool = False  # takes fewer dims of V than of K

    def __init__(self, device: str, threads: int):
        raise NotImplementedError

    def supports(self, row: Row) -> str | None:
        """Why it does not take a row; None: it does."""
        if row.unknown:
            return row.unknown
        if row.dtype not in self.dtypes:
            return f"{row.dtype}: takes {', '.join(self.dtypes)}"
        if row.kv_dtype not in (row.dtype, *self.kv_dtypes):
            return f"K and V in {row.kv_dtype}: not called so here"
        missing = [name for name, _ in row.features if name not in self.features]
        if missing:
            return f"{', '.join(missing)}: not called so here"
        if row.latent:
            return "V as a part of K: no kernel for MLA"
        if row.narrow_values and not self.narrow_values:
            return "fewer dims of V than of K: not called so here"
        return self.refuses(row)

    def refuses(self, row: Row) -> str | None:
        return None

    def forms(self, row: Row) -> list:
        """Where it can have K and V; all are tried and the fastest one counts."""
        raise NotImplementedError

    def prepare(self, row: Row, tensors) -> Prepared:
        raise NotImplementedError


def allowed(row: Row, form: Form) -> bool:
    """Contiguous rows leave a peer its choice of a layout. Pages are what a server has: their size stays, their axes may be the peer's."""
    return form.page == row.form.page if row.form.page else True


MODULES = ("ours", "of_torch", "of_flash_attention", "of_flashinfer", "of_mla", "of_sglang", "of_vllm", "of_hpc_ops", "of_onnxruntime",
           "of_ggml", "of_openvino")


def known_peers(device: str) -> dict:
    """name -> class, of those that there are for a device."""
    found = {}
    for module in MODULES:
        for peer in importlib.import_module(f"peers.{module}").PEERS:
            if device in peer.devices:
                found[peer.name] = peer
    return found
