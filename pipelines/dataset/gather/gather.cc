// Reads the rows of a batch from their places in Parquet files and checks each of them, while the calling thread lets
// other threads of Python run. It only says whether all is well: what is wrong, and why, is found by reading the batch
// again in Python.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__)
#include <cerrno>
#include <fcntl.h>
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#define GROUNDSWELL_SSE __attribute__((target("sse4.2,pclmul")))
#define GROUNDSWELL_AVX512 __attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2,pclmul")))

namespace {

constexpr int64_t longest_prefix = 1024;
constexpr int64_t page_bytes = 4096;

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

// The bytes are copied as they are read if there is a `copy`, which is aligned to a block then. The copy goes to memory
// past the caches: the processor does not read the old content of that memory first, and batches are read long after.
GROUNDSWELL_SSE inline __m128i block_at(const uint8_t* bytes, uint8_t* copy) {
    const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    if (copy != nullptr) _mm_stream_si128(reinterpret_cast<__m128i*>(copy), block);
    return block;
}

GROUNDSWELL_SSE uint32_t last_words(const uint8_t* bytes, size_t count, uint32_t state, uint8_t* copy) {
    if (copy == nullptr) return by_words(bytes, count, state);
    std::memcpy(copy, bytes, count);
    return by_words(copy, count, state);  // `bytes` may have changed since
}

// `copies` is known when this is compiled, so that nothing is decided in the loops.
template <bool copies>
GROUNDSWELL_SSE uint32_t by_blocks(const uint8_t* bytes, size_t count, uint32_t state, uint8_t* copy) {
    const auto target = [&](size_t place) { return copies ? copy + place : nullptr; };
    size_t done = 0;
    if (count >= 64) {
        __m128i blocks[4];
        for (int i = 0; i < 4; ++i) blocks[i] = block_at(bytes + 16 * i, target(16 * i));
        blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128(static_cast<int>(state)));
        const __m128i far = both(bits_512), near = both(bits_128);
        for (done = 64; count - done >= 64; done += 64)
            for (int i = 0; i < 4; ++i) {
                const size_t place = done + 16 * i;
                blocks[i] = moved(blocks[i], far, block_at(bytes + place, target(place)));
            }
        for (int i = 1; i < 4; ++i) blocks[i] = moved(blocks[i - 1], near, blocks[i]);
        uint8_t last[16];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(last), blocks[3]);
        state = by_words(last, sizeof last, 0);
    }
    return last_words(bytes + done, count - done, state, target(done));
}

GROUNDSWELL_AVX512 inline __m512i all(Distance distance) { return _mm512_broadcast_i32x4(both(distance)); }

GROUNDSWELL_AVX512 inline __m512i moved(__m512i blocks, __m512i distance, __m512i onto) {
    constexpr int exclusive_or = 0x96;
    return _mm512_ternarylogic_epi64(
        _mm512_clmulepi64_epi128(blocks, distance, 0x00), _mm512_clmulepi64_epi128(blocks, distance, 0x11), onto,
        exclusive_or);
}

GROUNDSWELL_AVX512 inline __m512i wide_block_at(const uint8_t* bytes, uint8_t* copy) {
    const __m512i block = _mm512_loadu_si512(bytes);
    if (copy != nullptr) _mm512_stream_si512(reinterpret_cast<__m512i*>(copy), block);
    return block;
}

template <bool copies>
GROUNDSWELL_AVX512 uint32_t by_wide_blocks(const uint8_t* bytes, size_t count, uint32_t state, uint8_t* copy) {
    const auto target = [&](size_t place) { return copies ? copy + place : nullptr; };
    size_t done = 0;
    if (count >= 256) {
        __m512i blocks[4];
        for (int i = 0; i < 4; ++i) blocks[i] = wide_block_at(bytes + 64 * i, target(64 * i));
        blocks[0] = _mm512_xor_si512(
            blocks[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
        const __m512i far = all(bits_2048), near = all(bits_512);
        for (done = 256; count - done >= 256; done += 256)
            for (int i = 0; i < 4; ++i) {
                const size_t place = done + 64 * i;
                blocks[i] = moved(blocks[i], far, wide_block_at(bytes + place, target(place)));
            }
        for (int i = 1; i < 4; ++i) blocks[i] = moved(blocks[i - 1], near, blocks[i]);
        uint8_t last[64];
        _mm512_storeu_si512(last, blocks[3]);
        state = by_words(last, sizeof last, 0);
    }
    return last_words(bytes + done, count - done, state, target(done));
}

// 0: this processor lacks the instructions; 1: it has them; 2: for wide registers too.
int64_t level_of_processor() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return 0;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("vpclmulqdq");
    return wide ? 2 : 1;
}

const int64_t processor_level = level_of_processor();

uint32_t checksum(const uint8_t* bytes, size_t count, uint32_t state, int64_t level) {
    return (level == 1 ? by_blocks<false> : by_wide_blocks<false>)(bytes, count, state, nullptr);
}

// Copies bytes to memory of any alignment, and returns their checksum, which costs nothing beside the copy.
uint32_t copied(uint8_t* copy, const uint8_t* bytes, size_t count, uint32_t state, int64_t level) {
    constexpr size_t alignment = 64;
    size_t head = (alignment - reinterpret_cast<uintptr_t>(copy) % alignment) % alignment;
    if (head > count) head = count;
    state = last_words(bytes, head, state, copy);
    const auto rest = level == 1 ? by_blocks<true> : by_wide_blocks<true>;
    return rest(bytes + head, count - head, state, copy + head);
}

// Where a file shrinks under its map, or its disk fails, the kernel sends SIGBUS to the thread that reads the map, which
// would end the process. A thread that copies rows has a place to go on at; for all others the signal is what it was.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* landing = nullptr;
struct sigaction others_action;

void on_bus_error(int signal, siginfo_t* info, void*) {
    if (landing != nullptr && info->si_code > 0) siglongjmp(*landing, 1);
    sigaction(SIGBUS, &others_action, nullptr);
    // A fault repeats itself when this returns; a signal that another process sent does not.
    if (info->si_code <= 0) raise(signal);
}

bool is_ours(const struct sigaction& action) {
    return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_bus_error;
}

// Whether faults of copies are caught: not where something else has taken the signal since, or this thread blocks it.
bool is_guarded() {
    struct sigaction current;
    sigset_t blocked;
    return sigaction(SIGBUS, nullptr, &current) == 0 && is_ours(current) &&
           pthread_sigmask(SIG_BLOCK, nullptr, &blocked) == 0 && !sigismember(&blocked, SIGBUS);
}

// Takes the signal the first time, and again where it was given back, as by `faulthandler.disable()`.
bool guard() {
    static std::mutex one_at_a_time;
    static bool taken = false;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    struct sigaction current;
    if (sigaction(SIGBUS, nullptr, &current) != 0) return false;
    const bool is_default = (current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL;
    const bool given_back = taken && current.sa_handler == others_action.sa_handler;
    if (!is_ours(current) && (!taken || is_default || given_back)) {
        struct sigaction action {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        others_action = current;
        taken = sigaction(SIGBUS, &action, nullptr) == 0;
    }
    return is_guarded();
}

struct Value {
    const int64_t* group;
    int64_t place, prefix_bytes, value_bytes;
    uint8_t *prefix, *value;
    bool is_mapped, is_checked;
};

// Reads the start of a value if that is in memory. Where it is not, the whole value is read with one call: it would come
// from disk in small parts as the map's pages are touched. The page of the prefix has the end of the row before too, so
// that it says nothing about this row; the page after it does.
bool starts_in_memory(const Value& given) {
    const auto descriptor = static_cast<int>(given.group[0]);
    const int64_t start = std::min(given.value_bytes, page_bytes);
    const iovec parts[2] = {
        {given.prefix, static_cast<size_t>(given.prefix_bytes)}, {given.value, static_cast<size_t>(start)}};
    if (preadv2(descriptor, parts, 2, given.place, RWF_NOWAIT) == given.prefix_bytes + start) return true;
    // The kernel has begun to read the start alone.
    posix_fadvise(descriptor, given.place, given.prefix_bytes + given.value_bytes, POSIX_FADV_WILLNEED);
    return false;
}

// Reads one value with its prefix; false if the file is too short or cannot be read.
bool read_value(const Value& given, uint32_t& state) {
    const auto descriptor = static_cast<int>(given.group[0]);
    const int64_t end = given.place + given.prefix_bytes + given.value_bytes;
    const iovec parts[2] = {
        {given.prefix, static_cast<size_t>(given.prefix_bytes)}, {given.value, static_cast<size_t>(given.value_bytes)}};
    if (given.is_mapped && starts_in_memory(given)) {
        const auto* map = reinterpret_cast<const uint8_t*>(given.group[1]);
        state = copied(
            given.value, map + given.place + given.prefix_bytes, static_cast<size_t>(given.value_bytes), state,
            processor_level);
        // The rest of a file's last page reads as zeros.
        struct stat found;
        return fstat(descriptor, &found) == 0 && found.st_size >= end;
    }
    if (preadv(descriptor, parts, 2, given.place) != end - given.place) return false;
    // Here the value is still in the processor's cache.
    if (given.is_checked)
        state = checksum(given.value, static_cast<size_t>(given.value_bytes), state, processor_level);
    return true;
}

}  // namespace

#define GROUNDSWELL_EXPORT extern "C" __attribute__((visibility("default")))

// See `level_of_processor`.
GROUNDSWELL_EXPORT int64_t groundswell_gather_level() {
    return processor_level;
}

// The CRC-32C of some bytes after others, whose CRC is `before`; at level 1 as an older processor computes it. They are
// copied too if there is a `copy`.
GROUNDSWELL_EXPORT uint32_t groundswell_crc32c(
    const uint8_t* bytes, int64_t count, uint32_t before, int64_t level, uint8_t* copy) {
    const auto size = static_cast<size_t>(count);
    return ~(copy == nullptr ? checksum(bytes, size, ~before, level) : copied(copy, bytes, size, ~before, level));
}

// Maps a file; returns its address, or 0 where it cannot be mapped, where its filesystem does not say what is in memory, or
// where a file that shrinks would end the process.
GROUNDSWELL_EXPORT int64_t groundswell_map(int64_t descriptor, int64_t bytes) {
    const auto file = static_cast<int>(descriptor);
    uint8_t first;
    const iovec part = {&first, 1};
    if (bytes <= 0 || (preadv2(file, &part, 1, 0, RWF_NOWAIT) < 0 && errno != EAGAIN) || !guard()) return 0;
    void* map = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, file, 0);
    return map == MAP_FAILED ? 0 : reinterpret_cast<int64_t>(map);
}

GROUNDSWELL_EXPORT void groundswell_unmap(int64_t map, int64_t bytes) {
    munmap(reinterpret_cast<void*>(map), static_cast<size_t>(bytes));
}

// Reads rows; returns whether all is well.
//   groups      (number of groups, 4 + columns): file descriptor; address of the file's map, or 0; address of the stored
//               checksums, or 0; address of the flags "not checked yet"; and the byte at which the first row begins in
//               each column
//   group_of    (rows,): each row's group
//   positions   (rows,): each row's number in its group
//   columns     (columns, 3): bytes from row to row, of them those of the prefix, address of the prefix that each has
//   values      (columns,): address of the memory for the values of all rows
//   always      whether rows are checked that were checked before
//   least       bytes from which on a value is copied from a map
GROUNDSWELL_EXPORT int64_t groundswell_gather(
    int64_t rows, int64_t column_count, const int64_t* groups, const int64_t* group_of, const int64_t* positions,
    const int64_t* columns, const int64_t* values, int64_t always, int64_t least) {
    const bool guarded = is_guarded();
    sigjmp_buf fault;
    if (sigsetjmp(fault, 1) != 0) {
        landing = nullptr;
        return false;
    }
    landing = &fault;
    uint8_t prefix[longest_prefix];
    bool well = true;
    for (int64_t row = 0; well && row < rows; ++row) {
        const int64_t* group = groups + group_of[row] * (4 + column_count);
        const int64_t position = positions[row];
        const auto* stored = reinterpret_cast<const uint8_t*>(group[2]);
        auto* unchecked = reinterpret_cast<uint8_t*>(group[3]);
        const bool checks = stored != nullptr && (always != 0 || unchecked[position] != 0);
        uint32_t state = ~0u;
        for (int64_t column = 0; well && column < column_count; ++column) {
            const int64_t stride = columns[3 * column], prefix_bytes = columns[3 * column + 1];
            const int64_t value_bytes = stride - prefix_bytes;
            auto* value = reinterpret_cast<uint8_t*>(values[column]) + row * value_bytes;
            const bool is_mapped = guarded && group[1] != 0 && value_bytes >= least;
            const auto* expected = reinterpret_cast<const uint8_t*>(columns[3 * column + 2]);
            well = prefix_bytes <= longest_prefix &&
                   read_value(
                       {group, group[4 + column] + position * stride, prefix_bytes, value_bytes, prefix, value, is_mapped,
                        checks},
                       state) &&
                   std::memcmp(prefix, expected, static_cast<size_t>(prefix_bytes)) == 0;
        }
        if (well && checks) {
            uint32_t expected;
            std::memcpy(&expected, stored + 4 * position, sizeof expected);
            well = ~state == expected;
            if (well) unchecked[position] = 0;
        }
    }
    landing = nullptr;
    _mm_sfence();  // another thread reads the copies
    return well;
}

#else
extern "C" __attribute__((visibility("default"))) int64_t groundswell_gather_level() { return 0; }
#endif
