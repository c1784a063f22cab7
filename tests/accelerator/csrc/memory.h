// Memory of the device "late", and host memory that it copies from and to at a later time.
//
// Each device has a range of addresses without any rights: tensors' pointers lie there, and the host that reads one
// ends with SIGSEGV. Tasks use the same memory through a second mapping, `real`.
//
// Invariants: a block is given out again only on the stream that it was allocated on, after all work that other
// streams had put on themselves before it was dropped (those of `record_stream` alone); before that, and when it is
// new, it is filled with 0xFF, which is NaN, in its stream's order. So a stream that reads dropped memory, or memory
// that nobody has written, computes NaN. Nothing here is held while a task runs; the monitor may be taken inside.
// Not done here: splitting blocks. A block is reused for its own size, rounded to 512 bytes, unless all that is cached
// is given back for want of memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "streams.h"

namespace late {

// -- Device memory

c10::DeviceAllocator& device_allocator();
void set_device_bytes(c10::DeviceIndex device, std::size_t nbytes);
// The device that an address belongs to, if it is one's.
std::optional<c10::DeviceIndex> device_of(const void* address);
// Where tasks find what lies at an address of a device; any other address is its own.
void* real(const void* address);

// -- Host memory that is pinned: allocated so (blocks are reused as torch's caching allocator does) or registered

at::HostAllocator& host_allocator();
void pin(void* address, std::size_t nbytes);  // throws if any of it is pinned already, as cudaHostRegister does
void unpin(void* address);                    // waits for tasks that use it; throws if it was not registered
// The addresses of what is registered now.
std::vector<std::uint64_t> registered();
bool is_pinned(const void* address);
// Whether all of a span is pinned. Throws where it starts in one pinned range and ends outside it, as CUDA does.
bool is_pinned(const void* address, std::size_t nbytes);
// A task uses a span of pinned memory. `context` is that of the tensor's storage: torch finds its own blocks by it or
// by their first address, and otherwise reuses a dropped one at once.
void use_pinned(const void* address, const void* context, StreamKey stream, Ticket ticket);

}  // namespace late
