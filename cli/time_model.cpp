#include "cli/time_model.hpp"

#include <algorithm>
#include <iterator>
#include <queue>
#include <unordered_map>

#include "backends/cuda/kernel_rows.hpp"
#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"
#include "lean/limits.hpp"

namespace lean::cli {
namespace {

/// The first row of the scope that holds so many packed rows, or its last; null without any.
const cuda::KernelRow* find_row(const cuda::ArchitectureRows& table, cuda::Scope scope, DType dtype, std::int32_t width,
                                std::int32_t rows) {
  const cuda::KernelRow* found = nullptr;
  for (const cuda::KernelRow& row : table) {
    if (row.scope != scope || row.kv_bytes != bytes_of(dtype) || row.head_dim != width) continue;
    found = &row;
    if (row.q_rows >= rows) break;
  }
  return found;
}

/// Of a call's workers as they stream: time, and how many bytes each that streams has had.
class Stream {
 public:
  Stream(double worker_rate, double memory_rate) : worker_rate_(worker_rate), memory_rate_(memory_rate) {}

  [[nodiscard]] double now() const { return now_; }
  [[nodiscard]] bool empty() const { return waiting_.empty() && reading_.empty(); }

  /// The worker reads so many bytes from a time on that is not past.
  void begin(std::int32_t worker, double bytes, double at) { waiting_.push({at, worker, bytes}); }

  /// Goes on until a worker has read what it began; returns it.
  std::int32_t next() {
    while (true) {
      const double rate = std::min(worker_rate_, memory_rate_ / static_cast<double>(std::max<std::size_t>(1, reading_.size())));
      const double end = reading_.empty() ? kNever : now_ + (reading_.top().at - had_) / rate;
      if (waiting_.empty() || end <= waiting_.top().at) {
        const std::int32_t worker = reading_.top().worker;
        had_ = reading_.top().at;
        now_ = end;
        reading_.pop();
        return worker;
      }
      const Event event = waiting_.top();
      waiting_.pop();
      if (!reading_.empty()) had_ += (event.at - now_) * rate;
      now_ = event.at;
      reading_.push({had_ + event.bytes, event.worker, 0.0});
    }
  }

 private:
  static constexpr double kNever = 1e300;
  struct Event {
    double at;  // a time, or bytes
    std::int32_t worker;
    double bytes;
    bool operator>(const Event& other) const { return at > other.at; }
  };
  using Queue = std::priority_queue<Event, std::vector<Event>, std::greater<>>;

  double worker_rate_;  // bytes a microsecond
  double memory_rate_;
  double now_ = 0.0;
  double had_ = 0.0;  // bytes that a worker would have had which streamed since the beginning
  Queue waiting_;
  Queue reading_;
};

/// Bytes of K and V in a segment: the last tile of a sequence may hold few tokens.
double segment_bytes(const schedule::Segment& segment, const explain::ScheduleMap& map, std::int64_t token_bytes) {
  const std::int64_t tokens = map.sequences[static_cast<std::size_t>(segment.output.sequence)].kv_tokens;
  const std::int64_t begin = std::int64_t{segment.tile_begin} * map.shape.tile_tokens;
  const std::int64_t end = min_of(tokens, std::int64_t{segment.tile_end} * map.shape.tile_tokens);
  return static_cast<double>(max_of<std::int64_t>(0, end - begin) * token_bytes);
}

/// Streams every segment of the map; returns when each worker with work ended.
std::vector<double> worker_ends(const explain::ScheduleMap& map, std::int64_t token_bytes, Stream stream, const WalkTimes& walk,
                                double stretch) {
  std::vector<std::size_t> segment_of(map.workers.size(), 0);
  std::unordered_map<std::int64_t, std::int32_t> arrived;  // by the output's first slot
  std::vector<double> ends;
  const auto begin = [&](std::size_t worker, double at) {
    const auto& segment = map.workers[worker].segments[segment_of[worker]];
    stream.begin(static_cast<std::int32_t>(worker), segment_bytes(segment, map, token_bytes), at);
  };
  for (std::size_t worker = 0; worker < map.workers.size(); ++worker) {
    if (!map.workers[worker].segments.empty()) begin(worker, 0.0);
  }
  while (!stream.empty()) {
    const auto worker = static_cast<std::size_t>(stream.next());
    const std::vector<schedule::Segment>& segments = map.workers[worker].segments;
    const schedule::Segment& segment = segments[segment_of[worker]];
    double end = stream.now();
    if (!segment.sole() && ++arrived[segment.slots.first] == segment.contributors) {
      end += (walk.merge_us + segment.contributors * walk.contributor_us) * stretch;
    }
    if (++segment_of[worker] < segments.size()) {
      begin(worker, end + walk.segment_us * stretch);
    } else {
      ends.push_back(end);
    }
  }
  std::sort(ends.begin(), ends.end());
  return ends;
}

}  // namespace

std::vector<Coefficient> coefficients_of(TimeModel& model) {
  return {{"step.worker_gbps", model.step.worker_gbps},
          {"any_call.tile_us", model.any_call.tile_us},
          {"any_call.worker_gbps", model.any_call.worker_gbps},
          {"sm80.tile_us", model.sm80.tile_us},
          {"sm80.worker_gbps", model.sm80.worker_gbps},
          {"flat.call_us", model.flat.call_us},
          {"flat.segment_us", model.flat.segment_us},
          {"flat.merge_us", model.flat.merge_us},
          {"flat.contributor_us", model.flat.contributor_us},
          {"general.call_us", model.general.call_us},
          {"general.segment_us", model.general.segment_us},
          {"general.merge_us", model.general.merge_us},
          {"general.contributor_us", model.general.contributor_us},
          {"memory_share", model.memory_share}};
}

void require_simulated(const ProblemSpec& spec) {
  if (spec.dtype == DType::kFloat32) throw BadArgument("--dtype", "fp32", "fp16 or bf16, which GPUs compute");
  if (spec.kv_dtype) throw BadArgument("--kv-dtype", name_of(*spec.kv_dtype), "auto: the model was fitted on 16-bit K and V");
  if (spec.q_tokens != 1) throw BadArgument("--n-q", std::to_string(spec.q_tokens), "1: the model was fitted on decode steps");
  if (spec.page_tokens != 0)
    throw BadArgument("--page-tokens", std::to_string(spec.page_tokens), "0: the model was fitted without pages");
  if (spec.window_left >= 0 || spec.window_right >= 0)
    throw BadArgument("--window-left and --window-right: the model was fitted without windows");
  if (spec.softcap != 0.0F || spec.alibi || spec.sinks)
    throw BadArgument("--softcap, --alibi and --sinks: the model was fitted without them");
  if (spec.values_in_keys) throw BadArgument("--latent: the model was fitted on values in memory of their own");
  if (spec.value_dim != 0)
    throw BadArgument("--value-dim", std::to_string(spec.value_dim), "0: the model was fitted on values as wide as keys");
  if (spec.head_dim % 8 != 0 || spec.head_dim > kWidestCudaHead) {
    throw BadArgument("--head-dim", std::to_string(spec.head_dim), "a multiple of 8 up to " + std::to_string(kWidestCudaHead));
  }
}

namespace {

/// The GPU runs the rows of sm_90, or newer ones of its own: what was timed of sm_90 stands for these.
bool runs_sm90(const GpuModel& gpu) { return cuda::runs(gpu.kernels, cuda::Architecture::kSm90); }

/// Bytes a us for each multiprocessor.
std::int32_t memory_share(const GpuModel& gpu) { return static_cast<std::int32_t>(gpu.read_gbps * 1e3 / gpu.multiprocessors); }

bool is_step(const GpuModel& gpu, Policy::Kind policy) { return runs_sm90(gpu) && policy == Policy::Kind::kLean; }

}  // namespace

cuda::KernelConfig gpu_kernel(const GpuModel& gpu, const ProblemSpec& spec, Policy::Kind policy) {
  const std::int32_t width =
      *std::find_if(std::begin(cuda::kHeadDims), std::end(cuda::kHeadDims), [&](std::int32_t dim) { return dim >= spec.head_dim; });
  const std::int32_t rows = spec.group();
  const cuda::KernelRow* row = nullptr;
  for (const cuda::ArchitectureRows& table : cuda::kKernelRows) {
    if (row != nullptr || !cuda::runs(gpu.kernels, table.architecture)) continue;
    const bool whole = width == spec.head_dim && rows <= cuda::kMmaRows;
    const cuda::Scope step = whole ? cuda::Scope::kDecodeStep : cuda::Scope::kTensorStep;
    row = find_row(table, is_step(gpu, policy) ? step : cuda::Scope::kAnyCall, spec.dtype, width, rows);
    // A step's kernel walks flat lines: every kv head's rows in one block.
    if (row != nullptr && row->scope != cuda::Scope::kAnyCall && row->q_rows < rows) row = nullptr;
  }
  if (row == nullptr) {
    throw BadArgument("--q-heads", std::to_string(spec.q_heads),
                      "at most 128 for each kv head: more are a wide tile's rows, which the model was not fitted on");
  }
  return cuda::config_of(gpu.kernels, *row, spec.dtype);
}

Prediction predict(const GpuModel& gpu, const ProblemSpec& spec, const Policy& policy, const TimeModel& model) {
  const cuda::KernelConfig kernel = gpu_kernel(gpu, spec, policy.kind);
  const ProblemShape shape(spec);
  Prediction result;
  result.map = explain::build_map({.lengths = LengthSource(shape.problem()),
                                   .shape = schedule::line_shape_of(shape.problem(), kernel.q_rows, kernel.tile_tokens),
                                   .cost_model = cuda::cost_model(kernel, memory_share(gpu)),
                                   .policy = policy,
                                   .workers = gpu.multiprocessors});
  const StreamTimes& on_sm90 = is_step(gpu, policy.kind) ? model.step : model.any_call;
  const StreamTimes& worker = runs_sm90(gpu) ? on_sm90 : model.sm80;
  const WalkTimes& walk = policy.kind == Policy::Kind::kLean ? model.flat : model.general;
  const double stretch = kTimedClockMhz / gpu.clock_mhz;
  const std::int64_t token_bytes = std::int64_t{2} * spec.head_dim * bytes_of(spec.dtype);
  const auto tile_bytes = static_cast<double>(token_bytes * kernel.tile_tokens);
  const double worker_rate = tile_bytes / ((worker.tile_us + tile_bytes / (worker.worker_gbps * 1e3)) * stretch);
  const double memory_rate = gpu.read_gbps * 1e3 * model.memory_share;
  result.ends_us = worker_ends(result.map, token_bytes, Stream(worker_rate, memory_rate), walk, stretch);
  result.read_us = static_cast<double>(spec.kv_bytes()) / memory_rate;
  if (result.ends_us.empty()) {
    result.us = walk.call_us * stretch;
    return result;
  }
  result.streaming_us = result.ends_us.back();
  result.us = walk.call_us * stretch + result.streaming_us;
  double busy = 0.0;
  for (const double end : result.ends_us) busy += end;
  result.occupancy = result.streaming_us > 0.0 ? busy / (result.streaming_us * gpu.multiprocessors) : 0.0;
  return result;
}

}  // namespace lean::cli
