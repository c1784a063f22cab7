// A process group for tensors of the device "late".
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>

namespace late {

// Called with a collective's name as it is issued, by whoever issues it.
using Told = std::function<void(const std::string&)>;

// Collectives of `host`, a backend for host tensors, as tasks on a stream of the group's own, in the order of calls on
// all ranks. A collective comes after the current stream's work; waiting for it makes the current stream wait. The
// host itself waits for barriers alone.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, Told told);

}  // namespace late
