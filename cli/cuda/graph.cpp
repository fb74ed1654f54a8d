// Graph: a captured chain of calls, its stream and the events around its replays.
#include "cli/cuda/check.hpp"

namespace lean::cli::gpu {

struct Graph::Handles {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  Handles() = default;
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    if (replay != nullptr) (void)cudaGraphExecDestroy(replay);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (begin != nullptr) (void)cudaEventDestroy(begin);
    if (end != nullptr) (void)cudaEventDestroy(end);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

Graph::Graph(const std::function<void(void*)>& enqueue) : handles_(std::make_unique<Handles>()) {
  Handles& h = *handles_;
  check(cudaStreamCreate(&h.stream), "cudaStreamCreate");
  check(cudaEventCreate(&h.begin), "cudaEventCreate");
  check(cudaEventCreate(&h.end), "cudaEventCreate");
  check(cudaStreamBeginCapture(h.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    enqueue(h.stream);
  } catch (...) {
    (void)cudaStreamEndCapture(h.stream, &h.graph);
    (void)cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(h.stream, &h.graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&h.replay, h.graph, 0), "cudaGraphInstantiate");
  check(cudaGraphUpload(h.replay, h.stream), "cudaGraphUpload");
  check(cudaStreamSynchronize(h.stream), "cudaStreamSynchronize");
}

Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

void Graph::launch(int replays) const {
  for (int i = 0; i < replays; ++i) check(cudaGraphLaunch(handles_->replay, handles_->stream), "cudaGraphLaunch");
}

double Graph::timed_us(int replays) const { return timed_us(nullptr, replays); }
double Graph::timed_us_behind(const Graph& other) const { return timed_us(other.handles_.get(), 1); }

double Graph::timed_us(const Handles* before, int replays) const {
  float ms = 0.0F;
  if (before != nullptr) check(cudaGraphLaunch(before->replay, handles_->stream), "cudaGraphLaunch");
  check(cudaEventRecord(handles_->begin, handles_->stream), "cudaEventRecord");
  launch(replays);
  check(cudaEventRecord(handles_->end, handles_->stream), "cudaEventRecord");
  check(cudaEventSynchronize(handles_->end), "cudaEventSynchronize");
  check(cudaEventElapsedTime(&ms, handles_->begin, handles_->end), "cudaEventElapsedTime");
  return static_cast<double>(ms) * 1e3;
}

}  // namespace lean::cli::gpu
