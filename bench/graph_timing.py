"""Calls on a GPU under one clock: captured in a CUDA graph, and the graph's replays timed by events."""
import torch


def graph_of(calls, **capture):
    """A graph of these calls in turn, each launched once before. It keeps them, and so what they read and write.

    capture: further arguments of torch.cuda.graph().
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, **capture):
        for call in calls:
            call()
    graph.calls = calls
    return graph


def time_us(graph, calls, replays=1):
    """Microseconds a call, of a graph that holds so many."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (calls * replays)
