// Rounding of numbers to whole numbers of 16 bits, which some processors multiply in pairs, twice as many in a cycle as float32
// numbers, and add up exactly in 32 bits.
#pragma once

#include "lanes.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>

namespace {

// Of a vector of up to 1,600 whole numbers: their largest magnitude, and their largest norm. By Cauchy and Schwarz a sum of products
// of two such vectors is less than 2^31, with half a rounding error for each number.
constexpr float LARGEST = 32767, TOP = 46320;
constexpr uint32_t MAGNITUDE = 0x7fffffff, EXPONENT = 0x7f800000, FINITE = 0x7f7fffff;  // bits of a float32
// Bits of the smallest and the largest power of two whose scale and inverse are normal numbers. A smaller number, below 2^-110, is 0.
constexpr uint32_t LEAST = 17 << 23, MOST = 253 << 23;

float as_float(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// The larger magnitudes, as bits, whose order is that of the numbers; NaN is above all.
Words larger(Words most, Lanes x) {
    Words bits = (Words)x & MAGNITUDE;
    return bits > most ? bits : most;
}

uint32_t top_of(Words most) { return _mm512_reduce_max_epu32((__m512i)most); }

// A power of two near the largest magnitude of a vector, and its inverse, which lose no digits.
struct Power {
    float power, inverse;
    explicit Power(uint32_t most) {
        uint32_t bits = std::min(most & EXPONENT, MOST);
        power = as_float(std::max(bits, LEAST)), inverse = bits < LEAST ? 0 : as_float((uint32_t{254} << 23) - bits);
    }
};

// What a vector's numbers, as shares of its power, are multiplied by to become whole numbers, and the scale that undoes all.
struct Scale {
    float factor = 0, scale = 0;
    Scale(uint32_t most, float squares) {
        Power all(most);
        if (most > FINITE) scale = NAN;
        if (most > FINITE || all.inverse == 0) return;
        factor = std::min(LARGEST / (as_float(most) * all.inverse), TOP / std::sqrt(squares));
        scale = all.power / factor;
    }
};

__m512i whole_words(Lanes lanes) { return _mm512_cvtps_epi32((__m512)lanes); }
__m256i whole(Lanes lanes) { return _mm512_cvtsepi32_epi16(whole_words(lanes)); }

// Whole numbers side by side: those of the first lanes, then those of the second.
__m512i pairs_of(Lanes first, Lanes second) {
    __m512i low = _mm512_and_si512(whole_words(first), _mm512_set1_epi32(0xffff));
    return _mm512_or_si512(low, _mm512_slli_epi32(whole_words(second), 16));
}

// Adds the products of pairs to whole numbers of 32 bits. With the function of immintrin.h compilers copy the sums at every step.
inline __attribute__((always_inline)) void add_pairs(__m512i &sums, __m512i row, __m512i column) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(row), "v"(column));
}

}  // namespace
#endif
