// The on-disk format: what a slot of a store begins with.
//
// A slot is a header of 4096 bytes and the payload, both at multiples of 4096 bytes of the
// store's file. All numbers are little-endian:
//
//   bytes        type      field
//      0 ..    7 u64       magic, the characters "OFFLSLOT"
//      8 ..   11 u32       format, 1
//     12 ..   15 u32       flags; bit 0: payload_crc holds a checksum (else it is 0)
//     16 ..   31 u8[16]    store, the uuid of the session's store in network order
//     32 ..   35 u32       subgroup
//     36 ..   39 u32       tensor
//     40 ..   43 u32       tile
//     44 ..   47 u32       payload_crc, CRC32C of the payload's nbytes
//     48 ..   55 u64       step, the version of the tile
//     56 ..   63 u64       a quarter of nbytes, which earlier versions verify; not looked at
//     64 ..   71 u64       nbytes, length of the payload
//     72 .. 4091 u8[4020]  zero
//   4092 .. 4095 u32       header_crc, CRC32C of bytes 0 .. 4091
//
// The header is written after (or in one request with the end of) the payload, and a slot is
// never overwritten while anything refers to it, so a torn write is either no header of the
// expected tile and step, or a payload without its checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "crc32c.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the slot header is written as it lies in memory: little-endian machines only"
#endif

namespace offload {

constexpr std::size_t kSectorBytes = 4096;
constexpr std::uint64_t kSlotMagic = 0x544f4c534c46464full;  // "OFFLSLOT"
constexpr std::uint32_t kSlotFormat = 1;
constexpr std::uint32_t kSlotHasChecksum = 1u << 0;

// Which version of which tile a slot holds: what a reader expects and a writer promises.
struct SlotIdentity {
  std::uint8_t store[16] = {};
  std::uint32_t subgroup = 0;
  std::uint32_t tensor = 0;
  std::uint32_t tile = 0;
  std::uint64_t step = 0;
  std::uint64_t nbytes = 0;
};

struct SlotHeader {
  std::uint64_t magic;
  std::uint32_t format;
  std::uint32_t flags;
  std::uint8_t store[16];
  std::uint32_t subgroup;
  std::uint32_t tensor;
  std::uint32_t tile;
  std::uint32_t payload_crc;
  std::uint64_t step;
  std::uint64_t words;
  std::uint64_t nbytes;
  std::uint8_t zero[4020];
  std::uint32_t header_crc;
};
static_assert(sizeof(SlotHeader) == kSectorBytes && offsetof(SlotHeader, step) == 48 &&
              offsetof(SlotHeader, zero) == 72 && offsetof(SlotHeader, header_crc) == 4092);

// What a transfer says of its payload's checksum.
struct PayloadTerms {
  // The checksum, if the caller knows it. Read: the header has to promise this one. Write: it need not be computed.
  std::optional<std::uint32_t> crc;
  // Read: whether the payload is compared with the header's checksum; else the caller does that, or nobody. Write:
  // whether the header gets a checksum.
  bool verify = true;
};

// The checksum of a payload that passes piece by piece, in order. Bytes are looked at only if it has to be computed
// (`takes`): to compare it, or to write it where the caller does not know it.
class PayloadSum {
 public:
  // For the header of a payload that is written.
  explicit PayloadSum(const PayloadTerms& terms)
      : takes_(terms.verify && !terms.crc), value_(terms.verify ? terms.crc.value_or(0) : 0) {}
  // To compare a payload that is read with its header.
  PayloadSum(const PayloadTerms& terms, const SlotHeader& header)
      : takes_(terms.verify && (header.flags & kSlotHasChecksum) != 0) {}

  void pass(const void* data, std::size_t nbytes) {
    if (takes_) value_ = crc32c(value_, data, nbytes);
  }
  bool takes() const { return takes_; }
  bool fits(const SlotHeader& header) const { return !takes_ || value_ == header.payload_crc; }
  std::uint32_t value() const { return value_; }

 private:
  bool takes_;
  std::uint32_t value_ = 0;
};

// Fill header; has_checksum says whether payload_crc is the payload's checksum, else it is not stored.
void make_header(const SlotIdentity& identity, bool has_checksum, std::uint32_t payload_crc, SlotHeader* header);

// Judge a header that was read. Return 0 if it is the expected one; kErrorHeader where it is damaged, of another
// format, or of another tile, step, store or length; kErrorChecksum where it promises another checksum than
// `terms.crc`.
std::int32_t admit(const SlotHeader& header, const SlotIdentity& expected, const PayloadTerms& terms);

}  // namespace offload
