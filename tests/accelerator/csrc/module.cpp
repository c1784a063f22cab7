// What Python calls; late.py says what each does.
#include <ATen/Context.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "group.h"
#include "memory.h"
#include "operators.h"
#include "random.h"
#include "streams.h"

namespace py = pybind11;

namespace late {
namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// A Python function that any thread may call, and the last one drop.
std::shared_ptr<py::function> shared(py::function function) {
  return {new py::function(std::move(function)), [](py::function* dropped) {
            const py::gil_scoped_acquire held;
            delete dropped;
          }};
}

// A function of Python's as a task. Its error is the device's, as any task's is.
void launch(c10::Stream stream, const std::string& name, py::function function) {
  const auto kept = shared(std::move(function));
  const py::gil_scoped_release released;
  put(stream, name, [kept] {
    const py::gil_scoped_acquire held;
    try {
      (*kept)();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

c10::intrusive_ptr<c10d::Backend> group_that_tells(c10::intrusive_ptr<c10d::Backend> host, py::function told) {
  return make_group(std::move(host), [told = shared(std::move(told))](const std::string& name) {
    const py::gil_scoped_acquire held;
    (*told)(name);
  });
}

py::dict counts_of_operators() {
  const auto found = counts();
  py::dict all;
  all["asynchronous"] = found.asynchronous;
  all["waited"] = found.waited;
  return all;
}

}  // namespace
}  // namespace late

PYBIND11_MODULE(_late, module) {
  using namespace late;
  module.def("init", [] { at::globalContext().lazyInitDevice(kLate); });  // before that, torch knows no pinned memory
  module.def("set_device_count", &set_device_count);
  module.def("device_count", &device_count);
  module.def("set_device_bytes",
             [](int device, std::size_t nbytes) { set_device_bytes(c10::DeviceIndex(device), nbytes); });
  module.def("pin", [](std::uint64_t address, std::size_t nbytes) { pin(pointer(address), nbytes); });
  module.def("unpin", [](std::uint64_t address) { unpin(pointer(address)); });
  module.def("registered", &registered);
  module.def("hold", [](c10::Stream stream) { hold(key(stream)); });
  module.def("release", [](c10::Stream stream) { release(key(stream)); });
  module.def("run_last", [](c10::Stream stream, bool last) { run_last(key(stream), last); });
  module.def("dawdle", [](c10::Stream stream, bool dawdles) { dawdle(key(stream), dawdles); });
  module.def("is_waited_for", [](c10::Stream stream) { return is_waited_for(key(stream)); });
  module.def("host_waits", &host_waits);
  module.def("set_delays", [](std::int64_t least_us, std::int64_t most_us, std::uint64_t seed) {
    set_delays(least_us, most_us, seed);
  });
  module.def("set_stream_delays", [](c10::Stream stream, std::int64_t least_us, std::int64_t most_us,
                                     std::uint64_t seed) { set_delays(key(stream), least_us, most_us, seed); });
  module.def("list_streams", &list_streams);
  module.def("default_stream", [](int device) { return default_stream(c10::DeviceIndex(device)); });
  module.def("launch", &launch);
  module.def("fail", &fail);
  module.def("forget_errors", &forget_errors);
  module.def("counts", &counts_of_operators);
  module.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });
  module.def("make_group", &group_that_tells);
  module.def("stop", &stop);
}
