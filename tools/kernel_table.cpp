// Prints the table of variants of the CUDA kernel (src/backends/cuda/kernel_rows.hpp): as JSON, a kernel a line, for
// tools/cuda_build.py, or as the table in docs/cuda-backend.md that tools/check_kernel_table.py holds against it. Needs no CUDA.
//
// Usage: kernel_table --json | --markdown
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"

namespace lean::cuda {
namespace {

const char* kv_name(std::int32_t kv_bytes, Scope scope) {
  if (traits_of(scope).converts) return "fp8, in a stage fp16";
  return kv_bytes == 1 ? "fp8" : "16 bits";
}

std::vector<NamedFamily> all_families() {
  std::vector<NamedFamily> families(std::begin(kFamilies), std::end(kFamilies));
  families.insert(families.end(), std::begin(kWideFamilies), std::end(kWideFamilies));
  return families;
}

/// Those that a build may leave out first, since they are the newest.
std::vector<ArchitectureRows> all_tables() {
  std::vector<ArchitectureRows> tables{kWideRows};
  tables.insert(tables.end(), std::begin(kKernelRows), std::end(kKernelRows));
  return tables;
}

std::vector<std::int32_t> all_head_dims() {
  std::vector<std::int32_t> dims(std::begin(kHeadDims), std::end(kHeadDims));
  for (const NamedFamily& named : kWideFamilies) {
    if (std::find(dims.begin(), dims.end(), named.family.head_dim) == dims.end()) dims.push_back(named.family.head_dim);
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

void print_json() {
  const char* separator = "[\n";
  for (const ArchitectureRows& table : all_tables()) {
    for (const KernelRow& row : table) {
      for (const NamedFamily& named : all_families()) {
        if (!named.family.has(row)) continue;
        const KernelConfig config = config_of(table.architecture, row, named.family.dtype);
        std::printf(
            "%s{\"architecture\": %d, \"dtype\": %d, \"head_dim\": %d, \"rows\": %d, \"scope\": %d, \"name\": \"%s rows %d sm_%d "
            "%s\", "
            "\"threads\": %d, \"spill_bytes\": %d}",
            separator, static_cast<int>(table.architecture), static_cast<int>(config.dtype), config.head_dim, config.q_rows,
            static_cast<int>(config.scope), std::string(named.name).c_str(), config.q_rows, static_cast<int>(table.architecture),
            config.traits().name, cta_threads(config) * config.ctas(), row.spill_bytes);
        separator = ",\n";
      }
    }
  }
  std::printf("\n]\n");
}

/// "8, 16: 256; 32: 128": row blocks and the tokens of their tiles.
std::string tiles_of(const ArchitectureRows& table, Scope scope, std::int32_t kv_bytes, std::int32_t head_dim) {
  std::string text;
  std::int32_t tokens = 0;
  for (const KernelRow& row : table) {
    if (row.scope != scope || row.kv_bytes != kv_bytes || row.head_dim != head_dim) continue;
    if (tokens == row.tile_tokens) {
      text.insert(text.rfind(':'), ", " + std::to_string(row.q_rows));
    } else {
      text += (text.empty() ? "" : "; ") + std::to_string(row.q_rows) + ": " + std::to_string(row.tile_tokens);
    }
    tokens = row.tile_tokens;
  }
  return text;
}

bool has_rows(const ArchitectureRows& table, Scope scope, std::int32_t kv_bytes) {
  return std::any_of(table.begin(), table.end(), [&](const KernelRow& r) { return r.scope == scope && r.kv_bytes == kv_bytes; });
}

void print_markdown() {
  std::string head = "| architecture, scope | K and V |";
  std::string rule = "|---|---|";
  for (const std::int32_t head_dim : all_head_dims()) head += " d " + std::to_string(head_dim) + " |", rule += "---|";
  std::printf("%s\n%s\n", head.c_str(), rule.c_str());
  for (const ArchitectureRows& table : all_tables()) {
    for (const Scope scope : kScopes) {
      for (const std::int32_t kv_bytes : {2, 1}) {
        if (!has_rows(table, scope, kv_bytes)) continue;
        std::printf("| sm_%d, %s | %s |", static_cast<int>(table.architecture), traits_of(scope).name, kv_name(kv_bytes, scope));
        for (const std::int32_t head_dim : all_head_dims())
          std::printf(" %s |", tiles_of(table, scope, kv_bytes, head_dim).c_str());
        std::printf("\n");
      }
    }
  }
  std::printf("\n| first of such rows | why | measured |\n|---|---|---|\n");
  std::vector<const char*> told;
  for (const ArchitectureRows& table : all_tables()) {
    for (const KernelRow& row : table) {
      const char* const why = row.reason.why;
      if (std::any_of(told.begin(), told.end(), [&](const char* other) { return std::strcmp(why, other) == 0; })) continue;
      told.push_back(why);
      std::printf("| sm_%d, %s, %s, d %d, %d rows | %s | `bench/results/%s` |\n", static_cast<int>(table.architecture),
                  traits_of(row.scope).name, kv_name(row.kv_bytes, row.scope), row.head_dim, row.q_rows, why, row.reason.measured);
    }
  }
}

}  // namespace
}  // namespace lean::cuda

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "--json") == 0) return lean::cuda::print_json(), 0;
  if (count == 2 && std::strcmp(arguments[1], "--markdown") == 0) return lean::cuda::print_markdown(), 0;
  std::fprintf(stderr, "usage: kernel_table --json | --markdown\n");
  return 2;
}
