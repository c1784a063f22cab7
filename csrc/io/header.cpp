#include "header.h"

#include <cstring>

#include "../runtime/completion_queue.h"

namespace offload {

void make_header(const SlotIdentity& identity, bool has_checksum, std::uint32_t payload_crc, SlotHeader* header) {
  std::memset(header, 0, sizeof *header);
  header->magic = kSlotMagic;
  header->format = kSlotFormat;
  header->flags = has_checksum ? kSlotHasChecksum : 0u;
  std::memcpy(header->store, identity.store, sizeof header->store);
  header->subgroup = identity.subgroup;
  header->tensor = identity.tensor;
  header->tile = identity.tile;
  header->payload_crc = has_checksum ? payload_crc : 0u;
  header->step = identity.step;
  header->words = identity.nbytes / 4;
  header->nbytes = identity.nbytes;
  header->header_crc = crc32c(0, header, offsetof(SlotHeader, header_crc));
}

std::int32_t admit(const SlotHeader& header, const SlotIdentity& expected, const PayloadTerms& terms) {
  const bool is_whole = header.magic == kSlotMagic && header.format == kSlotFormat &&
                        (header.flags & ~kSlotHasChecksum) == 0 &&
                        header.header_crc == crc32c(0, &header, offsetof(SlotHeader, header_crc));
  const bool matches = is_whole && std::memcmp(header.store, expected.store, sizeof header.store) == 0 &&
                       header.subgroup == expected.subgroup && header.tensor == expected.tensor &&
                       header.tile == expected.tile && header.step == expected.step && header.nbytes == expected.nbytes;
  if (!matches) return kErrorHeader;
  return terms.crc && *terms.crc != header.payload_crc ? kErrorChecksum : 0;
}

}  // namespace offload
