// Where things lie for products of warpgroups (wgmma, sm_90a), as functions of numbers alone: what the kernel computes addresses and
// rows by, and tests hold against the tables of the PTX ISA on a host. Every stage of K and V, and the queries, lie in columns of 128
// bytes a row: row by row, eight rows of a kibibyte swizzled among themselves, one column behind the other.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::cuda::wide {

inline constexpr std::int32_t kColumnBytes = 128;  // of a row in a column: the widest swizzle
inline constexpr std::int32_t kAtomRows = 8;       // rows that are swizzled among themselves
inline constexpr std::int32_t kPieceBytes = 16;    // what the swizzle moves
inline constexpr std::int32_t kPieces = kColumnBytes / kPieceBytes;
inline constexpr std::int32_t kStepBytes = 32;  // of a row in one product: 16 elements of 16 bits
inline constexpr std::int32_t kSteps = kColumnBytes / kStepBytes;

/// Bytes from the begin of columns of `rows` rows to a piece of a row (PTX ISA, "Tensors: Swizzling modes", 128 bytes).
[[nodiscard]] LEAN_HD constexpr std::uint32_t piece_place(std::int32_t rows, std::int32_t row, std::int32_t piece) noexcept {
  return static_cast<std::uint32_t>((piece / kPieces * rows + row) * kColumnBytes +
                                    (piece % kPieces ^ row % kAtomRows) * kPieceBytes);
}

/// Bytes from the begin of a factor whose rows run along the sum (Q, K) to where its descriptor for a step of 16 begins: in a column
/// by unswizzled bytes, since the hardware swizzles whatever address it comes to.
[[nodiscard]] LEAN_HD constexpr std::uint32_t step_place(std::int32_t rows, std::int32_t step) noexcept {
  return static_cast<std::uint32_t>(step / kSteps * rows * kColumnBytes + step % kSteps * kStepBytes);
}

/// The same of a factor whose rows are the sum's terms (V): 16 rows on.
[[nodiscard]] LEAN_HD constexpr std::uint32_t run_place(std::int32_t run) noexcept {
  return static_cast<std::uint32_t>(run * 16 * kColumnBytes);
}

/// The same from the begin of a stage to where its value dims from `dim` on begin, 16 bits each: a whole column, some columns on.
[[nodiscard]] LEAN_HD constexpr std::uint32_t value_place(std::int32_t dim, std::uint32_t column_bytes) noexcept {
  return static_cast<std::uint32_t>(dim * 2 / kColumnBytes) * column_bytes;
}

/// A matrix descriptor (PTX ISA, "Asynchronous Warpgroup Level Matrix: Matrix Descriptor Format"), all in units of 16 bytes: bits 0
/// to 13 where the factor begins, 16 to 29 from a column to the next, which only a product of a factor with rows as the sum's terms
/// crosses, 32 to 45 from eight rows to the next; 62 and 63 the swizzle, 1 of 128 bytes. The base offset (49 to 51) is 0: columns
/// begin at multiples of 1024 bytes.
[[nodiscard]] LEAN_HD constexpr std::uint64_t descriptor(std::uint32_t shared_address, std::uint32_t column_bytes) noexcept {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{kAtomRows * kColumnBytes / 16} << 32;
  return kSwizzle128 | kEightRows | std::uint64_t{column_bytes / 16} << 16 | (shared_address & 0x3FFFFU) / 16;
}

/// The descriptor of what begins so many bytes, a multiple of 16, behind a factor: one addition of 32 bits, since addresses of shared
/// memory leave room above them.
[[nodiscard]] LEAN_HD constexpr std::uint64_t further(std::uint64_t of_factor, std::uint32_t bytes) noexcept {
  return (of_factor >> 32) << 32 | (static_cast<std::uint32_t>(of_factor) + bytes / 16);
}

/// An element of a product's 64 rows.
struct Place {
  std::int32_t row = 0;
  std::int32_t column = 0;

  bool operator==(const Place&) const = default;
};

/// Which element of the accumulator (64 x N) a thread of the warpgroup has in a register (PTX ISA, "wgmma: Register Fragments for
/// D"): of every 8 columns two neighbours of a row, then the same two 8 rows below.
[[nodiscard]] LEAN_HD constexpr Place accumulator_place(std::int32_t thread, std::int32_t register_index) noexcept {
  const std::int32_t lane = thread % 32;
  return {.row = thread / 32 * 16 + lane / 4 + register_index % 4 / 2 * 8,
          .column = register_index / 4 * 8 + lane % 4 * 2 + register_index % 2};
}

/// Bytes from the begin of a column of `rows` rows to where lane i of a warp has row i % 8 of matrix i / 8 stored, transposed, of the four
/// that the warp has in 16 columns of an accumulator from `column` on, eight rows of its 16 and eight columns each (PTX ISA, "stmatrix"):
/// so that a column of the accumulator becomes a row, and its 64 rows what the column holds of it.
[[nodiscard]] LEAN_HD constexpr std::uint32_t transposed_place(std::int32_t rows, std::int32_t thread,
                                                               std::int32_t column) noexcept {
  const std::int32_t matrix = thread % 32 / 8;
  return piece_place(rows, column + matrix / 2 * 8 + thread % 8, thread / 32 * 2 + matrix % 2);
}

/// Which registers of an accumulator, two neighbours, make register i of operand A (64 x 16) of a further product over its columns
/// ("wgmma: Register Fragments for A"): those of a run of 16 columns lie where they have to.
[[nodiscard]] LEAN_HD constexpr std::int32_t operand_pair(std::int32_t run, std::int32_t i) noexcept {
  return (2 * run + i / 2) * 4 + i % 2 * 2;
}

}  // namespace lean::cuda::wide
