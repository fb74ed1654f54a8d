"""decode(), supports() and check_lengths(): one call of the library on arrays of any framework."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from lean_attention import _core
from lean_attention._arguments import Array, declared, lse_shape, taking_what_is
from lean_attention._frameworks import framework_of
from lean_attention._options import flag


@taking_what_is(declared)
def decode(q: Array, k: Array, v: Array, **arguments: Any) -> Any:
    framework = framework_of(q)
    ops = framework.ops
    if ops is not None:
        if ops.must_dispatch(q):
            return ops.dispatch(q, k, v, arguments)
        ops.refuse_gradients(q, k, v, arguments)
    out, lse, return_lse = arguments.get("out"), arguments.get("lse"), arguments.get("return_lse")
    made_out = out is None
    written = [out, lse] if out is not None or lse is not None else []
    if arguments.get("append_k") is not None:
        written += [k, v]
    if made_out:
        out = arguments["out"] = framework.output(q, v)
    if return_lse:
        return_lse = flag("return_lse", return_lse)
    made_lse = lse is None and return_lse
    if made_lse:
        shape = lse_shape(q.shape, arguments.get("cu_seqlens_q") is not None, arguments.get("layout", "bhsd"))
        lse = arguments["lse"] = framework.empty_float32(q, shape)
    _core.decode(framework, q, k, v, arguments)
    if written and framework.wrote is not None:
        framework.wrote(written)
    if framework.finish is not None:
        out, lse = (framework.finish(out) if made_out else out), (framework.finish(lse) if made_lse else lse)
    return (out, lse) if return_lse else out


class Support(NamedTuple):
    """True when decode() would accept the call; else `code` and `reason` say why not."""

    ok: bool
    code: str = "ok"
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def supports(q: Array, k: Array, v: Array, **arguments: Any) -> Support:
    """Whether decode() with these arguments would be accepted. Reads no array's contents.

    Args:
        q, k, v: as decode() takes them.
        arguments: any of decode()'s other arguments.

    Returns:
        A Support: true, or false with a code and the reason. What the backend does not do is the answer, not an error.

    Raises:
        TypeError: an argument that decode() does not have, or that is no array.
        ValueError: shapes do not fit each other.
    """
    framework = framework_of(q)
    if arguments.get("out") is None:
        arguments["out"] = framework.output(q, v)
    refused = _core.supports(framework, q, k, v, arguments)
    return Support(True) if refused is None else Support(False, *refused)


def check_lengths(q: Array, k: Array, v: Array, **arguments: Any) -> None:
    """Looks at the lengths and page ids that decode() with these arguments would get, without computing anything.

    Lengths on a device are copied to the host, which waits for the device. decode() itself does this where they are on
    the host; with ``Options(check_lengths=True)`` everywhere.

    Args:
        q, k, v: as decode() takes them.
        arguments: any of decode()'s other arguments.

    Raises:
        ValueError: an entry lies outside what there is; the message names argument, entry and value.
        TypeError, ValueError: as decode().
    """
    framework = framework_of(q)
    if arguments.get("out") is None:
        arguments["out"] = framework.output(q, v)
    _core.check_lengths(framework, q, k, v, arguments)


def sticky_status(q: Array, *, stream: Optional[int] = None, reset: bool = True) -> Support:
    """What calls on q's device and this stream had to clamp or skip in device memory, since it was last asked with `reset`.

    ``code`` is "bad_lengths" or "bad_page_index" (with ``Options(check_workspace=True)`` also "workspace_dirty" and
    "workspace_in_use"). ``message`` names the first such entry: "seqlens[1] = 500: allowed 0 to 128 (the tokens there is
    room for); it was clamped".
    Waits for the device. On the CPU decode() itself raises.

    Args:
        q: any array on the device.
        stream: as decode() takes it. Default: the framework's current stream.
        reset: forget the fault, so that the next one is seen. No call or captured graph may be in flight then.
    """
    found = _core.sticky_status(framework_of(q), q, stream, reset)
    return Support(True) if found is None else Support(False, *found)
