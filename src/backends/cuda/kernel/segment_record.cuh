// SegmentRecord: a segment, or under fixed_chunk a chunk of it, as the producer announces it to the consumer warps.
#pragma once

#include <cstdint>

#include "fixup/arrival.hpp"
#include "fixup/chunk_tree.hpp"
#include "problem/sequence.hpp"
#include "schedule/segments.hpp"

namespace lean::cuda {

/// Partials that one worker merges, of an output's contributors or of a bundle of them: what is known of them before they come.
struct MergeRun {
  const float* first = nullptr;
  const float* second = nullptr;  // all after the first are a pitch apart
  std::int64_t pitch = 0;         // floats
  std::int32_t parts = 0;
  std::int32_t index = 0;             // of the worker's own
  fixup::Counter* counter = nullptr;  // of their arrivals
  float* slot = nullptr;              // for the result; null: it goes to the output

  [[nodiscard]] __device__ __forceinline__ const float* at(std::int32_t part) const {
    return part == 0 ? first : second + (part - 1) * pitch;
  }
  /// Parts [begin, end) of them.
  [[nodiscard]] __device__ __forceinline__ MergeRun of(std::int32_t begin, std::int32_t end) const {
    return {.first = at(begin), .second = at(begin + 1), .pitch = pitch, .parts = end - begin};
  }
};

/// fixed_chunk: where the result of one chunk goes in the worker's stack of tree nodes.
struct ChunkPlace {
  std::int32_t output_first = 0;  // first chunk of the output
  std::int32_t place = 0;         // on the stack
  std::int32_t merges = 0;        // with this many nodes below it
  fixup::ChunkNode node;          // what is left of them
  bool ends_output = false;       // the last chunk of an output that nobody shares
  bool ends_shared = false;       // the segment's last chunk, of an output that is shared
};

struct SegmentRecord {
  std::int64_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_block = 0;
  std::int32_t rows = 0;
  Sequence lengths;
  std::int32_t token_begin = 0;  // tokens [begin, end) of the sequence that a row sees, in whole tiles but for the ends
  std::int32_t token_end = 0;
  std::int32_t first_seen = 0;  // no row sees a token before this one
  // Known when the barrier contributors_known has been passed.
  std::int32_t contributor = 0;
  std::int32_t contributors = 1;
  bool stays = false;  // for a joint merge: the worker has nothing to do behind it
  schedule::SlotMap slots;
  float* slot = nullptr;            // where the result goes; null: to the output
  MergeRun run;                     // the first to be merged; of many rows then the bundles'
  std::uint16_t* output = nullptr;  // query token 0 of the group's first head
  float v_scale = 1.0F;             // of fp8 values
  ChunkPlace chunk;
  bool last = false;           // nothing more: no segment
  bool queries_asked = false;  // by who announced it; of the first segment a consumer asks for them else

  [[nodiscard]] __device__ bool sole() const { return contributors == 1; }

  /// Tokens copied and computed together from `token` on: up to the end of its LeanTile.
  [[nodiscard]] __device__ std::int32_t tokens_from(std::int32_t token, std::int32_t tile_tokens) const {
    return min(tile_tokens - (token - lengths.kv_begin) % tile_tokens, token_end - token);
  }
};

}  // namespace lean::cuda
