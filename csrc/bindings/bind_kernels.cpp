#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../kernels/dispatch.h"
#include "../kernels/float_environment.h"
#include "../kernels/jobs.h"
#include "../kernels/prefetch.h"
#include "../kernels/programs.h"
#include "../kernels/seal.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace offload;

namespace {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelSet* set : supported_kernels()) names.emplace_back(set->name);
  return names;
}

const KernelSet& kernels_named(const std::string& name) {
  const auto sets = supported_kernels();
  if (name.empty()) return *sets.back();
  for (const KernelSet* set : sets)
    if (name == set->name) return *set;
  throw std::invalid_argument("this CPU does not have instruction set \"" + name + "\"");
}

// Return a copy of the segment table at an address; throw what is wrong with it.
std::vector<Segment> copy_table(std::uintptr_t address, std::size_t rows) {
  const Segment* table = reinterpret_cast<const Segment*>(address);
  const std::string problem = check_table(table, rows);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return std::vector<Segment>(table, table + rows);
}

GradientBlocks gradient_blocks_of(std::uintptr_t source, std::int32_t source_dtype, std::uint64_t numel,
                                  std::uintptr_t blocks, std::uintptr_t destination, std::int32_t destination_dtype) {
  return {reinterpret_cast<const void*>(source), source_dtype,     numel, reinterpret_cast<double*>(blocks),
          reinterpret_cast<void*>(destination),  destination_dtype};
}

GradientBlocks checked(const GradientBlocks& work) {
  const std::string problem = check_gradient_blocks(work);
  if (!problem.empty()) throw std::invalid_argument(problem);
  return work;
}

std::tuple<std::uint32_t, std::uint32_t> pair_of(PrefetchBytes bytes) { return {bytes.together, bytes.blocks}; }

// A `SealedTensor`, as Python says it.
using SealedRow = std::tuple<std::uintptr_t, std::uint32_t, std::uint32_t, std::uint64_t>;

// What Python holds of a seal; shared in C++ alone, as StoreFile in bind_io.cpp.
struct SharedSeal {
  std::shared_ptr<const Seal> seal;
};

// Return where a run is stored, after checking form and addresses. Forms above kFloat32 have a second address.
Stored stored_at(std::int32_t form, std::uintptr_t first, std::uintptr_t beside, std::uint64_t stride,
                 std::uint64_t first_index, std::uint64_t numel) {
  if (form_facts(form).item_bytes == 0) throw std::invalid_argument("unknown form " + std::to_string(form));
  if (numel != 0 && (first == 0 || (form > kFloat32 && beside == 0))) throw std::invalid_argument("an address is null");
  return {form,   reinterpret_cast<unsigned char*>(first), reinterpret_cast<unsigned char*>(beside),
          stride, first_index,                             numel};
}

// A worker pool with one instruction set: what offload.kernels wraps. Takes addresses, checks values.
class CpuKernels {
 public:
  CpuKernels(CompletionQueue& queue, unsigned threads, const std::string& instruction_set)
      : queue_(queue), kernels_(kernels_named(instruction_set)), pool_(threads) {}

  const char* instruction_set() const { return kernels_.name; }
  unsigned threads() const { return pool_.threads(); }

  void submit(std::uint64_t op, std::uintptr_t table, std::size_t rows) {
    pool_.submit(std::make_shared<ReportingTableJob>(copy_table(table, rows), update_of(kernels_), queue_, op));
  }
  SharedSeal submit_sealed(std::uint64_t op, std::uintptr_t table, std::size_t rows, std::uintptr_t offsets,
                           const std::vector<SealedRow>& tensors, std::uint64_t numel, std::uint64_t tile_numel,
                           const SharedSeal* expected) {
    const auto* offset = reinterpret_cast<const std::uint64_t*>(offsets);
    SealedState state{{offset, offset + rows}, {}, numel, tile_numel, nullptr};
    for (const auto& [address, item_bytes, item_numel, nbytes] : tensors)
      state.tensors.push_back({reinterpret_cast<char*>(address), {item_bytes, item_numel, nbytes}});
    if (expected != nullptr) state.expected = expected->seal;
    const auto job =
        std::make_shared<SealedTableJob>(copy_table(table, rows), std::move(state), update_of(kernels_), queue_, op);
    pool_.submit(job);
    return {job->seal()};
  }
  void run(std::uintptr_t table, std::size_t rows) {
    TableJob job(copy_table(table, rows), update_of(kernels_));
    pool_.run(job);
  }
  void stream(std::uintptr_t table, std::size_t rows, std::uint32_t variant) {
    const auto kernel = kernels_.stream;
    TableJob job(copy_table(table, rows), [kernel, variant](const Segment& s, std::uint64_t begin, std::uint64_t end) {
      kernel(s, begin, end, variant);
    });
    pool_.run(job);
  }
  std::uint64_t gradient_blocks(std::uintptr_t source, std::int32_t source_dtype, std::uint64_t numel,
                                std::uintptr_t blocks, std::uintptr_t destination, std::int32_t destination_dtype) {
    GradientBlocksJob job(
        checked(gradient_blocks_of(source, source_dtype, numel, blocks, destination, destination_dtype)), kernels_);
    pool_.run(job);
    return job.fingerprint();
  }
  void fingerprints(std::uintptr_t addresses, std::uintptr_t sizes, std::size_t rows, std::uintptr_t found) {
    const auto* address = reinterpret_cast<const std::uint64_t*>(addresses);
    const auto* nbytes = reinterpret_cast<const std::uint64_t*>(sizes);
    std::vector<FingerprintsJob::Range> ranges;
    ranges.reserve(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      if (address[i] == 0 && nbytes[i] != 0)
        throw std::invalid_argument("gradient " + std::to_string(i) + ": its address is null");
      ranges.push_back({reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address[i])), nbytes[i]});
    }
    FingerprintsJob job(std::move(ranges), kernels_);
    pool_.run(job);
    for (std::size_t i = 0; i < rows; ++i) reinterpret_cast<std::uint64_t*>(found)[i] = job.fingerprint(i);
  }
  void add(std::uintptr_t table, std::size_t rows, std::int32_t dtype) {
    if (dtype < kBfloat16 || dtype > kFloat32)
      throw std::invalid_argument("dtype " + std::to_string(dtype) + " is not a dtype code");
    const auto* cell = reinterpret_cast<const std::uint64_t*>(table);
    std::vector<AddJob::Row> found;
    found.reserve(rows);
    for (std::size_t i = 0; i < rows; ++i, cell += 3) {
      if (cell[2] != 0 && (cell[0] == 0 || cell[1] == 0))
        throw std::invalid_argument("gradient " + std::to_string(i) + ": an address is null");
      found.push_back({reinterpret_cast<char*>(static_cast<std::uintptr_t>(cell[0])),
                       reinterpret_cast<const char*>(static_cast<std::uintptr_t>(cell[1])), cell[2]});
    }
    AddJob job(std::move(found), dtype, kernels_);
    pool_.run(job);
  }
  void close() { pool_.close(); }

 private:
  CompletionQueue& queue_;
  const KernelSet& kernels_;
  WorkerPool pool_;  // last: it joins its workers before what they use goes
};

}  // namespace

void bind_kernels(nb::module_& module) {
  module.attr("SEGMENT_BYTES") = sizeof(Segment);
  module.def("instruction_sets", &instruction_sets,
             "Return the names of the instruction sets that this CPU runs, fastest last.");
  module.def(
      "processor",
      [] {
        const Processor found = this_processor();
        return std::make_tuple(std::string(found.vendor), found.family);
      },
      "Return vendor and family of this CPU as CPUID says them; (\"\", 0) where there is none.");
  module.def(
      "prefetch_of",
      [](const std::string& vendor, std::uint32_t family) { return pair_of(prefetch_of(vendor.c_str(), family)); },
      nb::arg("vendor"), nb::arg("family"), "Return the distances that csrc/kernels/prefetch.cpp has for a processor.");
  module.def(
      "prefetch_bytes", [] { return pair_of(prefetch_bytes()); },
      "Return how many bytes ahead updates ask for memory: side by side, and block by block.");
  module.def(
      "set_prefetch_bytes",
      [](std::uint32_t together, std::uint32_t blocks) {
        if (together > kMostPrefetchBytes || blocks > kMostPrefetchBytes)
          throw std::invalid_argument("at most " + std::to_string(kMostPrefetchBytes) + " bytes ahead");
        set_prefetch_bytes({together, blocks});
      },
      nb::arg("together"), nb::arg("blocks"), "Set what `prefetch_bytes` returns, for the whole process.");
  module.attr("MOST_PREFETCH_BYTES") = kMostPrefetchBytes;
  module.def(
      "sum_in_order",
      [](std::uintptr_t address, std::size_t count) {
        nb::gil_scoped_release release;
        const DefaultFloatEnvironment environment;
        return sum_in_order(reinterpret_cast<const double*>(address), count);
      },
      nb::arg("address"), nb::arg("count"), "Add float64 values one after the other, starting from 0.0.");
  module.def(
      "norm_sq",
      [](std::uintptr_t addresses, std::uintptr_t counts, std::size_t rows) {
        nb::gil_scoped_release release;
        const DefaultFloatEnvironment environment;
        const auto* address = reinterpret_cast<const std::uint64_t*>(addresses);
        double total = 0.0;
        for (std::size_t i = 0; i < rows; ++i)
          total = total + sum_in_order(reinterpret_cast<const double*>(static_cast<std::uintptr_t>(address[i])),
                                       reinterpret_cast<const std::uint64_t*>(counts)[i]);
        return total;
      },
      nb::arg("addresses"), nb::arg("counts"), nb::arg("rows"),
      "Add the `sum_in_order` of arrays of float64, given by address and count, in order.");
  module.def(
      "check_table",
      [](std::uintptr_t address, std::size_t rows) {
        return check_table(reinterpret_cast<const Segment*>(address), rows);
      },
      nb::arg("address"), nb::arg("rows"), "Return what is wrong with a segment table, or an empty string.");
  module.def(
      "update_programs",
      [](std::uintptr_t table, std::size_t rows, std::uint64_t block_numel, std::uintptr_t programs, std::size_t room) {
        UpdatePrograms found;
        {
          nb::gil_scoped_release release;
          found = update_programs(reinterpret_cast<const Segment*>(table), rows, block_numel,
                                  reinterpret_cast<Program*>(programs), room);
        }
        std::vector<std::tuple<std::uint32_t, std::uint32_t, std::int32_t, std::int32_t, bool, std::uint64_t>> launches;
        for (const Launch& each : found.launches)
          launches.emplace_back(each.first->rule, each.first->state_format, each.gradient, each.weight, each.aligned,
                                each.count);
        return std::make_tuple(found.problem, launches);
      },
      nb::arg("table"), nb::arg("rows"), nb::arg("block_numel"), nb::arg("programs"), nb::arg("room"),
      "Write the programs of an update on a GPU; return what is wrong, or its launches (csrc/kernels/programs.h).");
  module.def(
      "row_programs",
      [](std::uintptr_t sizes, std::size_t rows, std::size_t stride, std::uint64_t block, std::uintptr_t programs,
         std::size_t room) {
        nb::gil_scoped_release release;
        return row_programs(reinterpret_cast<const std::uint64_t*>(sizes), rows, stride, block,
                            reinterpret_cast<Program*>(programs), room);
      },
      nb::arg("sizes"), nb::arg("rows"), nb::arg("stride"), nb::arg("block"), nb::arg("programs"), nb::arg("room"),
      "Write a program for each started block of each size, if there is room; return how many there are.");
  module.def(
      "check_gradient_blocks",
      [](std::uintptr_t source, std::int32_t source_dtype, std::uint64_t numel, std::uintptr_t blocks,
         std::uintptr_t destination, std::int32_t destination_dtype) {
        return check_gradient_blocks(
            gradient_blocks_of(source, source_dtype, numel, blocks, destination, destination_dtype));
      },
      nb::arg("source"), nb::arg("source_dtype"), nb::arg("numel"), nb::arg("blocks"), nb::arg("destination"),
      nb::arg("destination_dtype"), "Return what is wrong with these arguments, or an empty string.");
  module.def(
      "decode",
      [](std::int32_t form, std::uintptr_t first, std::uintptr_t beside, std::uint64_t stride,
         std::uint64_t first_index, std::uint64_t numel, std::uintptr_t values, std::int32_t dtype, const std::string& instruction_set) {
        if (dtype < kBfloat16 || dtype > kFloat32)
          throw std::invalid_argument("dtype " + std::to_string(dtype) + " is not a dtype code");
        const Stored stored = stored_at(form, first, beside, stride, first_index, numel);
        const KernelSet& kernels = kernels_named(instruction_set);
        nb::gil_scoped_release release;
        const DefaultFloatEnvironment environment;
        if (numel != 0) kernels.decode(stored, reinterpret_cast<void*>(values), dtype);
      },
      nb::arg("form"), nb::arg("first"), nb::arg("beside"), nb::arg("stride"), nb::arg("first_index"), nb::arg("numel"),
      nb::arg("values"), nb::arg("dtype"), nb::arg("instruction_set") = "",
      "Write what is stored to `values`, rounded to a dtype; see `Stored` in csrc/kernels/kernels.h.");
  module.def(
      "encode",
      [](std::int32_t form, std::uintptr_t first, std::uintptr_t beside, std::uint64_t stride,
         std::uint64_t first_index, std::uint64_t numel, std::uintptr_t values, std::uintptr_t roots, const std::string& instruction_set) {
        const Stored stored = stored_at(form, first, beside, stride, first_index, numel);
        const KernelSet& kernels = kernels_named(instruction_set);
        nb::gil_scoped_release release;
        const DefaultFloatEnvironment environment;
        const auto* divisors = reinterpret_cast<const unsigned char*>(roots);
        if (numel != 0) kernels.encode(stored, reinterpret_cast<const void*>(values), divisors);
      },
      nb::arg("form"), nb::arg("first"), nb::arg("beside"), nb::arg("stride"), nb::arg("first_index"), nb::arg("numel"),
      nb::arg("values"), nb::arg("roots"), nb::arg("instruction_set") = "",
      "Store fp32 values, rounded to nearest, in planes to odd; codes are zeros where those at `roots` are.");
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<SharedSeal>(module, "Seal", "Checksums of a subgroup's state that an update has made; see csrc/kernels/seal.h.")
      .def(
          "checksum",
          [](const SharedSeal& self, std::size_t tensor, std::size_t tile) {
            if (tensor >= self.seal->tensors() || tile >= self.seal->tiles())
              throw std::out_of_range("the seal has no such tile");
            return self.seal->checksum(tensor, tile);
          },
          nb::arg("tensor"), nb::arg("tile"), "CRC32C of a tile, once the update has ended well.");
  nb::class_<CpuKernels>(module, "CpuKernels", "Worker threads that run update kernels; see offload.kernels.")
      .def(nb::init<CompletionQueue&, unsigned, const std::string&>(), nb::keep_alive<1, 2>(), nb::arg("queue"),
           nb::arg("threads"), nb::arg("instruction_set") = "")
      .def_prop_ro("instruction_set", &CpuKernels::instruction_set)
      .def_prop_ro("threads", &CpuKernels::threads)
      .def("submit", &CpuKernels::submit, release(), nb::arg("op"), nb::arg("table"), nb::arg("rows"))
      .def("submit_sealed", &CpuKernels::submit_sealed, release(), nb::arg("op"), nb::arg("table"), nb::arg("rows"),
           nb::arg("offsets"), nb::arg("tensors"), nb::arg("numel"), nb::arg("tile_numel"),
           nb::arg("expected").none())
      .def("run", &CpuKernels::run, release(), nb::arg("table"), nb::arg("rows"))
      .def("stream", &CpuKernels::stream, release(), nb::arg("table"), nb::arg("rows"), nb::arg("variant"))
      .def("gradient_blocks", &CpuKernels::gradient_blocks, release(), nb::arg("source"), nb::arg("source_dtype"),
           nb::arg("numel"), nb::arg("blocks"), nb::arg("destination"), nb::arg("destination_dtype"))
      .def("fingerprints", &CpuKernels::fingerprints, release(), nb::arg("addresses"), nb::arg("sizes"),
           nb::arg("rows"), nb::arg("found"))
      .def("add", &CpuKernels::add, release(), nb::arg("table"), nb::arg("rows"), nb::arg("dtype"))
      .def("close", &CpuKernels::close, release());
}
