// Vectors of LANES float32 numbers, loaded from float32 or bfloat16 and stored as either, rounded once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS  // the processor multiplies pairs of bfloat16
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

Lanes load(const bfloat16 *from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

void store(Lanes lanes, float *to) { std::memcpy(to, &lanes, sizeof lanes); }

// To the nearest, to the even one of two; NaN stays NaN.
void store(Lanes lanes, bfloat16 *to) {
#ifdef PAIRS
    __m256bh halves = _mm512_cvtneps_pbh((__m512)lanes);
#else
    Words words = (Words)lanes;
    words = (lanes != lanes) ? words | 0x400000 : words + 0x7fff + (words >> 16 & 1);
    Halves halves = __builtin_convertvector(words >> 16, Halves);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// Of fewer numbers than LANES: the others are 0.
template <class T>
Lanes load_part(const T *from, int64_t count) {
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return load(part);
}

// Calls work(i) for every LANES numbers of a width; the last ones begin earlier where the width is no multiple.
template <class Work>
inline __attribute__((always_inline)) void blocks(int64_t width, Work work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i);
    if (i < width) work(width - LANES);
}

template <class T>
Lanes rounded(Lanes lanes) {
    T stored[LANES];
    store(lanes, stored);
    return load(stored);
}

// The lanes of the upper half of those that are left, in front.
template <int HALF>
inline __attribute__((always_inline)) Lanes upper(Lanes lanes) {
    Words order;
    for (int lane = 0; lane < LANES; lane++) order[lane] = (lane + HALF) % LANES;
    return __builtin_shuffle(lanes, order);
}

inline __attribute__((always_inline)) float sum(Lanes lanes) {
    lanes += upper<8>(lanes);
    lanes += upper<4>(lanes);
    lanes += upper<2>(lanes);
    return lanes[0] + lanes[1];
}

inline __attribute__((always_inline)) float greatest(Lanes lanes) {
    auto larger = [](Lanes one, Lanes other) { return one > other ? one : other; };
    lanes = larger(lanes, upper<8>(lanes));
    lanes = larger(lanes, upper<4>(lanes));
    lanes = larger(lanes, upper<2>(lanes));
    return std::max(lanes[0], lanes[1]);
}

// The lanes from `low` up to `high`, and `other` for the rest.
inline __attribute__((always_inline)) Lanes between(Lanes lanes, int64_t low, int64_t high, float other) {
    typedef int32_t Numbers __attribute__((vector_size(4 * LANES)));
    Numbers lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Numbers inside = (lane >= int32_t(low)) & (lane < int32_t(high));
    return inside ? lanes : other - Lanes{};
}

// e^x to float32's precision, 0 below -87. x = whole ln 2 + rest, and e^rest by the polynomial of Cephes' expf. Adding MAGIC
// leaves the whole number in the last bits of the sum, from where it is added to the exponent of the result.
inline __attribute__((always_inline)) Lanes exponential(Lanes x) {
    constexpr float LOWEST = -87, HIGHEST = 88, MAGIC = 12582912;
    Lanes high = HIGHEST - Lanes{};
    Lanes bounded = x > HIGHEST ? high : x;
    Lanes shifted = bounded * 1.44269504f + MAGIC, whole = shifted - MAGIC;
    Lanes rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Lanes power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) power = power * rest + next;
    power = power * rest * rest + rest + 1.0f;
    Lanes result = (Lanes)((Words)power + ((Words)shifted << 23));
    return x < LOWEST ? Lanes{} : result;
}

inline __attribute__((always_inline)) Lanes hyperbolic_tangent(Lanes x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

}  // namespace
