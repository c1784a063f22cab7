#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <sys/vfs.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "../io/header.h"
#include "../io/io_threads.h"
#include "../io/store_file.h"
#include "../runtime/completion_queue.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace offload;

namespace {

std::array<std::uint8_t, 16> store_bytes(const nb::bytes& store) {
  std::array<std::uint8_t, 16> raw{};
  if (store.size() != raw.size()) throw std::invalid_argument("a store's uuid has 16 bytes");
  std::memcpy(raw.data(), store.c_str(), raw.size());
  return raw;
}

// An offload.protocols.TileId.
using Tile = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

SlotIdentity slot_identity(const std::array<std::uint8_t, 16>& store, const Tile& tile, std::uint64_t step,
                           std::uint64_t nbytes) {
  SlotIdentity identity;
  std::memcpy(identity.store, store.data(), store.size());
  std::tie(identity.subgroup, identity.tensor, identity.tile) = tile;
  identity.step = step;
  identity.nbytes = nbytes;
  return identity;
}

// What Python holds of a StoreFile. A shared_ptr that nanobind makes takes the GIL when it lets
// go, which I/O threads must never do; this one is shared in C++ alone.
struct SharedFile {
  std::shared_ptr<StoreFile> file;
};

// Start to move a tile, given the fields of an offload.protocols.TileRequest.
template <IoKind kKind>
void transfer(IoThreads& threads, const SharedFile& file, std::uint64_t op, const Tile& tile, std::uint64_t step,
              std::uint64_t offset, std::uintptr_t address, std::uint64_t nbytes, std::optional<std::uint32_t> crc,
              bool verify) {
  IoRequest request;
  request.kind = kKind;
  request.op = op;
  request.identity = slot_identity(file.file->store(), tile, step, nbytes);
  request.file = file.file;
  request.offset = offset;
  request.address = reinterpret_cast<void*>(address);
  request.terms = {crc, verify};
  threads.submit(std::move(request));
}

// A header's bytes need not be aligned in a Python object.
SlotHeader header_from(const nb::bytes& raw) {
  if (raw.size() != sizeof(SlotHeader)) throw std::invalid_argument("a slot header has 4096 bytes");
  SlotHeader header;
  std::memcpy(&header, raw.c_str(), sizeof header);
  return header;
}

IoKind kind_named(const std::string& name) {
  if (name == "read") return IoKind::kRead;
  if (name == "write") return IoKind::kWrite;
  if (name == "sync") return IoKind::kSync;
  if (name == "allocate") return IoKind::kAllocate;
  throw std::invalid_argument("kind is one of read, write, sync, allocate");
}

template <auto kImplementation>
std::uint32_t crc_of(std::uintptr_t address, std::size_t nbytes, std::uint32_t seed) {
  nb::gil_scoped_release release;
  return kImplementation(seed, reinterpret_cast<const void*>(address), nbytes);
}

void bind_checksums(nb::module_& module) {
  module.def("crc32c", &crc_of<crc32c>, "address"_a, "nbytes"_a, "seed"_a = 0,
             "CRC32C of nbytes at a memory address, continuing from seed. GIL released; the caller keeps the memory.");
  module.def("crc32c_portable", &crc_of<crc32c_portable>, "address"_a, "nbytes"_a, "seed"_a = 0,
             "The same by tables, on any processor; the oracle for crc32c.");
#if defined(__x86_64__)
  module.def("crc32c_sse42", &crc_of<crc32c_sse42>, "address"_a, "nbytes"_a, "seed"_a = 0,
             "The same where there is SSE4.2 but no AVX-512; for tests.");
#endif
  module.def("crc32c_combine", &crc32c_combine, "crc_a"_a, "crc_b"_a, "nbytes_b"_a,
             "CRC32C of a followed by b, from theirs and the length of b.");
  module.def("crc32c_implementation", &crc32c_implementation, "Which version crc32c uses here.");
}

void bind_headers(nb::module_& module) {
  module.def(
      "make_slot_header",
      [](const nb::bytes& store, const Tile& tile, std::uint64_t step, std::uint64_t nbytes,
         std::optional<std::uint32_t> crc) {
        SlotHeader header;
        make_header(slot_identity(store_bytes(store), tile, step, nbytes), crc.has_value(), crc.value_or(0), &header);
        return nb::bytes(reinterpret_cast<const char*>(&header), sizeof header);
      },
      "store"_a, "tile"_a, "step"_a, "nbytes"_a, "checksum"_a = nb::none(),
      "The 4096 bytes that a slot begins with (csrc/io/header.h); checksum None: none was computed.");
  module.def(
      "admit_slot_header",
      [](const nb::bytes& raw, const nb::bytes& store, const Tile& tile, std::uint64_t step, std::uint64_t nbytes,
         std::optional<std::uint32_t> crc, bool verify) -> std::pair<std::int32_t, std::optional<std::uint32_t>> {
        const SlotHeader header = header_from(raw);
        const PayloadTerms terms{crc, verify};
        const std::int32_t error = admit(header, slot_identity(store_bytes(store), tile, step, nbytes), terms);
        if (error != 0 || !PayloadSum(terms, header).takes()) return {error, std::nullopt};
        return {0, header.payload_crc};
      },
      "raw"_a, "store"_a, "tile"_a, "step"_a, "nbytes"_a, "checksum"_a = nb::none(), "verify"_a = true,
      "(0 or an error, what the payload is to be compared with or None), as IoThreads judge a header that was read.");
}

void bind_files(nb::module_& module) {
  module.def(
      "file_system_magic",
      [](const std::string& path) {
        struct statfs room{};
        if (statfs(path.c_str(), &room) != 0) {
          PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
          throw nb::python_error();
        }
        return static_cast<std::uint32_t>(room.f_type);
      },
      "path"_a, "The number by which statfs names the file system that path lies on.");
  nb::class_<SharedFile>(module, "StoreFile", "The data file of a store: its descriptor (taken over) and its growth.")
      .def(
          "__init__",
          [](SharedFile* self, int fd, bool direct, const nb::bytes& store, std::uint64_t max_bytes,
             std::uint64_t extent_bytes) {
            const auto uuid = store_bytes(store);
            new (self) SharedFile{std::make_shared<StoreFile>(fd, direct, uuid, max_bytes, extent_bytes)};
          },
          "fd"_a, "direct"_a, "store"_a, "max_bytes"_a = 0, "extent_bytes"_a = std::uint64_t{256} << 20)
      .def_prop_ro(
          "used_bytes", [](const SharedFile& self) { return self.file->used_bytes(); },
          "End of the furthest slot that was ever written.")
      .def(
          "reserve",
          [](const SharedFile& self, std::uint64_t end, bool exact) { return self.file->reserve(end, exact); },
          "end"_a, "exact"_a = false, nb::call_guard<nb::gil_scoped_release>(),
          "Make sure that bytes up to end (exact: and no more) are allocated, and count them as used; return 0 or an "
          "errno.")
      .def(
          "free_bytes", [](const SharedFile& self) { return self.file->free_bytes(); },
          "Bytes by which slots may still grow: the lesser of the file system's room and max_bytes.");

  nb::class_<IoThreads>(module, "IoThreads",
                        "A thread pool, each direction on threads of its own; see csrc/io/io_threads.h. Submit and\n"
                        "close from one thread.")
      .def(nb::init<CompletionQueue&, std::size_t, std::size_t>(), "queue"_a, "depth"_a, "piece_bytes"_a,
           nb::keep_alive<1, 2>())
      .def("read", &transfer<IoKind::kRead>, "file"_a, "op"_a, "tile"_a, "step"_a, "offset"_a, "address"_a, "nbytes"_a,
           "checksum"_a = nb::none(), "verify"_a = true, "Start reading a slot; see offload.protocols.TileRequest.")
      .def("write", &transfer<IoKind::kWrite>, "file"_a, "op"_a, "tile"_a, "step"_a, "offset"_a, "address"_a,
           "nbytes"_a, "checksum"_a = nb::none(), "verify"_a = true,
           "Start writing a slot; see offload.protocols.TileRequest.")
      .def(
          "sync",
          [](IoThreads& self, const SharedFile& file, std::uint64_t op) {
            IoRequest request;
            request.kind = IoKind::kSync;
            request.op = op;
            request.file = file.file;
            self.submit(std::move(request));
          },
          "file"_a, "op"_a, "Make every write that was submitted before durable (fdatasync).")
      .def("set_depth", &IoThreads::set_depth, "depth"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Have at most so many requests of each direction in flight from now on; nothing is in flight meanwhile.")
      .def("close", &IoThreads::close, nb::call_guard<nb::gil_scoped_release>(),
           "Finish what is in flight and join the threads; idempotent.")
      .def(
          "inject",
          [](IoThreads& self, const std::string& kind, std::uint64_t nth, int error, std::size_t limit_bytes) {
            if (nth < 1) throw std::invalid_argument("nth counts from 1");
            FaultList::Fault fault;
            fault.kind = kind_named(kind);
            fault.nth = nth;
            fault.error = error;
            fault.limit_bytes = limit_bytes;
            self.inject(fault);
          },
          "kind"_a, "nth"_a = 1, "error"_a = 0, "limit_bytes"_a = 0,
          "For tests: the nth next system call of kind (read, write, sync, allocate) fails with errno error, or\n"
          "moves at most limit_bytes (rounded up to whole sectors with O_DIRECT) where error is 0.");
}

}  // namespace

void bind_io(nb::module_& module) {
  bind_checksums(module);
  bind_headers(module);
  bind_files(module);
}
