#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../runtime/completion_queue.h"
#include "bindings.h"

namespace nb = nanobind;
using offload::Completion;
using offload::CompletionQueue;

void bind_runtime(nb::module_& module) {
  using Record = std::tuple<std::uint64_t, std::int32_t, std::uint64_t, double, double>;
  nb::class_<CompletionQueue>(module, "CompletionQueue",
                              "The one queue that native threads, Python clients and callers report to.")
      .def(nb::init<>())
      .def(
          "post",
          [](CompletionQueue& queue, std::uint64_t op, std::int32_t error, std::uint64_t detail, double started_s,
             double finished_s) { queue.push(Completion{op, error, detail, started_s, finished_s}); },
          nb::arg("op"), nb::arg("error") = 0, nb::arg("detail") = 0, nb::arg("started_s") = 0.0,
          nb::arg("finished_s") = 0.0, "Report a completion from Python; any thread.")
      .def(
          "exchange",
          [](CompletionQueue& queue, std::uint64_t op, CompletionQueue& reply, double quiet_s,
             std::uint64_t interrupt_op) {
            std::optional<nb::python_error> raised;
            {
              nb::gil_scoped_release release;
              queue.push(Completion{op});
              // At least once a second, look whether all lanes are silent. Only then signal handlers run; what one
              // raises is kept, as the answer has to arrive before this call may end.
              while (reply.wait(std::min(quiet_s, 1.0)).empty()) {
                if (queue.silence_s() < quiet_s) continue;
                if (!raised) {
                  nb::gil_scoped_acquire acquire;
                  if (PyErr_CheckSignals() != 0) raised.emplace();
                }
                if (raised) queue.nudge(interrupt_op);
              }
            }
            if (raised) throw std::move(*raised);
          },
          nb::arg("op"), nb::arg("reply"), nb::arg("quiet_s"), nb::arg("interrupt_op"),
          "Report op and wait until something arrives on reply, in one call that no signal handler cuts short. Once\n"
          "nothing has been reported for quiet_s, handlers run; what one raises is raised when the answer is there,\n"
          "and interrupt_op is reported until then, about once a second.")
      .def(
          "wait",
          [](CompletionQueue& queue, double timeout_s) {
            std::vector<Completion> taken;
            {
              nb::gil_scoped_release release;
              taken = queue.wait(timeout_s);
            }
            std::vector<Record> records;
            records.reserve(taken.size());
            for (const auto& c : taken) records.emplace_back(c.op, c.error, c.detail, c.started_s, c.finished_s);
            return records;
          },
          nb::arg("timeout_s") = -1.0,
          "Return all completions that have arrived as (op, error, detail, started_s, finished_s);\n"
          "wait up to timeout_s seconds (negative: for ever) for the first. GIL released.");
}
