// schedule() of Python: explain_schedule() for lengths without arrays.
#include "schedule_text.hpp"

#include "arguments.hpp"
#include "errors.hpp"
#include "options.hpp"

namespace lean::python {
namespace {

constexpr Py_ssize_t kArguments = 5;

std::int64_t integer_at(PyObject* tuple, Py_ssize_t index) {
  const long long value = PyLong_AsLongLong(checked(PyTuple_GetItem(tuple, index)));
  if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  return value;
}

Strides dense(std::int64_t heads, std::int64_t tokens, std::int64_t dims) noexcept {
  return {.sequence = heads * tokens * dims, .head = tokens * dims, .token = dims};
}

/// Aligned addresses that nothing reads: supports() only asks whether they are null and apart.
void* placeholder(std::uintptr_t number) noexcept { return reinterpret_cast<void*>(number * 4096); }

Problem problem_of(PyObject* sizes) {
  const auto int32_at = [&](Py_ssize_t index) {
    const std::int64_t size = integer_at(sizes, index);
    if (size < INT32_MIN || size > INT32_MAX)
      raise(PyExc_ValueError, "schedule: %lld: must fit 32 bits", static_cast<long long>(size));
    return static_cast<std::int32_t>(size);
  };
  const auto dtype = static_cast<DType>(int32_at(7));
  Problem problem{.batch = integer_at(sizes, 0),
                  .q_heads = int32_at(1),
                  .kv_heads = int32_at(2),
                  .head_dim = int32_at(3),
                  .value_dim = int32_at(4),
                  .q_tokens = int32_at(5),
                  .kv_capacity = int32_at(6)};
  problem.q = {.data = placeholder(1), .dtype = dtype, .strides = dense(problem.q_heads, problem.q_tokens, problem.head_dim)};
  problem.k = {.data = placeholder(2), .dtype = dtype, .strides = dense(problem.kv_heads, problem.kv_capacity, problem.head_dim)};
  problem.v = {.data = placeholder(3), .dtype = dtype, .strides = dense(problem.kv_heads, problem.kv_capacity, problem.value_dim)};
  problem.o = {.data = placeholder(4), .dtype = dtype, .strides = dense(problem.q_heads, problem.q_tokens, problem.value_dim)};
  problem.scores.causal = int32_at(8) != 0;
  problem.scores.window_left = int32_at(9);
  problem.scores.window_right = int32_at(10);
  return problem;
}

const std::int32_t* lengths_of(PyObject* object, const char* name) {
  if (object == Py_None) return nullptr;
  return static_cast<const std::int32_t*>(read_array(object, name, nullptr).data);
}

}  // namespace

std::string schedule_text(PyObject* const* arguments, Py_ssize_t count) {
  if (count != kArguments) raise(PyExc_TypeError, "_core.schedule: %zd arguments, expected %zd", count, kArguments);
  const long format = PyLong_AsLong(arguments[0]);
  if (format == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  Problem problem = problem_of(arguments[1]);
  problem.kv_lengths = lengths_of(arguments[2], "seqlens");
  problem.kv_left_pad = lengths_of(arguments[3], "leftpad");
  const Options options = options_of(arguments[4]).options;
  check(supports(problem, options));
  const auto wanted = static_cast<ScheduleFormat>(format);
  std::string text(explain_schedule(problem, options, wanted, nullptr, 0), '\0');
  if (text.empty()) raise(PyExc_RuntimeError, "schedule: no explanation");
  static_cast<void>(explain_schedule(problem, options, wanted, text.data(), text.size()));
  text.pop_back();  // the final zero
  return text;
}

}  // namespace lean::python
