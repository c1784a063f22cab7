// A process group for tensors of the device "late".
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace late {

// Collectives of `host`, a backend for host tensors, as tasks on a stream of the group's own, in the order of calls on
// all ranks. A collective comes after the current stream's work; waiting for it makes the current stream wait. The
// host itself waits for barriers alone.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace late
