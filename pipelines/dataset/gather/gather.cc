// Reads the rows of a batch from their places in Parquet files and checks each of them, while the calling thread lets
// other threads of Python run. It only says whether all is well: what is wrong, and why, is found by reading the batch
// again in Python.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <sys/uio.h>

#define GROUNDSWELL_SSE __attribute__((target("sse4.2,pclmul")))
#define GROUNDSWELL_AVX512 __attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2,pclmul")))

namespace {

constexpr int64_t longest_prefix = 1024;

// CRC-32C (`row_checksum` in rows.py), of a state without the inversions at both ends.
GROUNDSWELL_SSE uint32_t by_words(const uint8_t* bytes, size_t count, uint32_t state) {
    uint64_t wide = state;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    state = static_cast<uint32_t>(wide);
    for (; count > 0; --count, ++bytes) state = _mm_crc32_u8(state, *bytes);
    return state;
}

// The CRC of a message is that of a shorter one: a block B of 128 bits, D bits before another, may be replaced by
//     low 64 bits of B * (x^(D + 32) mod P) + high 64 bits of B * (x^(D - 32) mod P)
// added to that other one, products without carry. P is the polynomial; a number stands for its bits in reverse order,
// shifted by one. Source: Gopal et al. 2009, "Fast CRC computation for generic polynomials using PCLMULQDQ".
struct Distance {
    uint64_t low, high;
};
constexpr Distance bits_128{0x0f20c0dfe, 0x14cd00bd6};
constexpr Distance bits_512{0x0740eef02, 0x09e4addf8};
constexpr Distance bits_2048{0x0dcb17aa4, 0x0b9e02b86};

GROUNDSWELL_SSE inline __m128i both(Distance distance) {
    return _mm_set_epi64x(static_cast<int64_t>(distance.high), static_cast<int64_t>(distance.low));
}

GROUNDSWELL_SSE inline __m128i moved(__m128i block, __m128i distance, __m128i onto) {
    const __m128i low = _mm_clmulepi64_si128(block, distance, 0x00), high = _mm_clmulepi64_si128(block, distance, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

GROUNDSWELL_SSE inline __m128i block_at(const uint8_t* bytes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

GROUNDSWELL_SSE uint32_t by_blocks(const uint8_t* bytes, size_t count, uint32_t state) {
    if (count >= 64) {
        __m128i blocks[4];
        for (int i = 0; i < 4; ++i) blocks[i] = block_at(bytes + 16 * i);
        blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128(static_cast<int>(state)));
        const __m128i far = both(bits_512), near = both(bits_128);
        for (bytes += 64, count -= 64; count >= 64; bytes += 64, count -= 64)
            for (int i = 0; i < 4; ++i) blocks[i] = moved(blocks[i], far, block_at(bytes + 16 * i));
        for (int i = 1; i < 4; ++i) blocks[i] = moved(blocks[i - 1], near, blocks[i]);
        uint8_t last[16];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(last), blocks[3]);
        state = by_words(last, sizeof last, 0);
    }
    return by_words(bytes, count, state);
}

GROUNDSWELL_AVX512 inline __m512i all(Distance distance) { return _mm512_broadcast_i32x4(both(distance)); }

GROUNDSWELL_AVX512 inline __m512i moved(__m512i blocks, __m512i distance, __m512i onto) {
    constexpr int exclusive_or = 0x96;
    return _mm512_ternarylogic_epi64(
        _mm512_clmulepi64_epi128(blocks, distance, 0x00), _mm512_clmulepi64_epi128(blocks, distance, 0x11), onto,
        exclusive_or);
}

GROUNDSWELL_AVX512 uint32_t by_wide_blocks(const uint8_t* bytes, size_t count, uint32_t state) {
    if (count >= 256) {
        __m512i blocks[4];
        for (int i = 0; i < 4; ++i) blocks[i] = _mm512_loadu_si512(bytes + 64 * i);
        blocks[0] = _mm512_xor_si512(
            blocks[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
        const __m512i far = all(bits_2048), near = all(bits_512);
        for (bytes += 256, count -= 256; count >= 256; bytes += 256, count -= 256)
            for (int i = 0; i < 4; ++i) blocks[i] = moved(blocks[i], far, _mm512_loadu_si512(bytes + 64 * i));
        for (int i = 1; i < 4; ++i) blocks[i] = moved(blocks[i - 1], near, blocks[i]);
        uint8_t last[64];
        _mm512_storeu_si512(last, blocks[3]);
        state = by_words(last, sizeof last, 0);
    }
    return by_words(bytes, count, state);
}

using Checksum = uint32_t (*)(const uint8_t*, size_t, uint32_t);

Checksum chosen() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return nullptr;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("vpclmulqdq");
    return wide ? by_wide_blocks : by_blocks;
}

const Checksum checksum = chosen();

}  // namespace

#define GROUNDSWELL_EXPORT extern "C" __attribute__((visibility("default")))

// 0: this processor has not what it takes; 1: it has; 2: with wide registers too.
GROUNDSWELL_EXPORT int64_t groundswell_gather_level() {
    return checksum == nullptr ? 0 : (checksum == by_blocks ? 1 : 2);
}

// The CRC-32C of some bytes after others, whose CRC is `before`; at level 1 as an older processor computes it.
GROUNDSWELL_EXPORT uint32_t groundswell_crc32c(const uint8_t* bytes, int64_t count, uint32_t before, int64_t level) {
    return ~(level == 1 ? by_blocks : checksum)(bytes, static_cast<size_t>(count), ~before);
}

// Reads rows; returns the first one at which something is wrong, or -1.
//   groups      (number of groups, 3 + columns): file descriptor; address of the stored checksums, or 0; address of the
//               flags "not checked yet"; and the byte at which the first row begins in each column
//   group_of    (rows,): each row's group
//   positions   (rows,): each row's number in its group
//   columns     (columns, 3): bytes from row to row, of them those of the prefix, address of the prefix that each has
//   values      (columns,): address of the memory for the values of all rows
//   always      whether rows are checked that were checked before
GROUNDSWELL_EXPORT int64_t groundswell_gather(
    int64_t rows, int64_t column_count, const int64_t* groups, const int64_t* group_of, const int64_t* positions,
    const int64_t* columns, const int64_t* values, int64_t always) {
    uint8_t prefix[longest_prefix];
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t* group = groups + group_of[row] * (3 + column_count);
        const int64_t position = positions[row];
        const auto* stored = reinterpret_cast<const uint8_t*>(group[1]);
        auto* unchecked = reinterpret_cast<uint8_t*>(group[2]);
        const bool checks = stored != nullptr && (always != 0 || unchecked[position] != 0);
        uint32_t state = ~0u;
        for (int64_t column = 0; column < column_count; ++column) {
            const int64_t stride = columns[3 * column], prefix_bytes = columns[3 * column + 1];
            const int64_t value_bytes = stride - prefix_bytes;
            if (prefix_bytes > longest_prefix) return row;
            auto* value = reinterpret_cast<uint8_t*>(values[column]) + row * value_bytes;
            const iovec parts[2] = {
                {prefix, static_cast<size_t>(prefix_bytes)}, {value, static_cast<size_t>(value_bytes)}};
            const int64_t place = group[3 + column] + position * stride;
            if (preadv(static_cast<int>(group[0]), parts, 2, place) != stride) return row;
            const auto* expected = reinterpret_cast<const uint8_t*>(columns[3 * column + 2]);
            if (std::memcmp(prefix, expected, static_cast<size_t>(prefix_bytes)) != 0) return row;
            // Here the value is still in the processor's cache.
            if (checks) state = checksum(value, static_cast<size_t>(value_bytes), state);
        }
        if (checks) {
            uint32_t expected;
            std::memcpy(&expected, stored + 4 * position, sizeof expected);
            if (~state != expected) return row;
            unchecked[position] = 0;
        }
    }
    return -1;
}

#else
extern "C" __attribute__((visibility("default"))) int64_t groundswell_gather_level() { return 0; }
#endif
