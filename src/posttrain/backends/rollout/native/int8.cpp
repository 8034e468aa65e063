// Products of rows with weights of eight bits, one scale for every column of the output (a row of the weights).
//
// A column's sum runs over the depth in one order, whatever the number of rows and threads, so that a row's result depends on
// that row alone, to the bit. Weights are read as 8 bits each and become numbers in registers (few rows) or in a buffer of one
// panel (many rows). int8.py says what the arguments are.

#include "lanes.h"

#if defined(PAIRS) && defined(__AVX512VBMI__)
#define TABLES  // bytes are looked up in tables of 128
#endif

namespace {

#define ALL_AT_ONCE _Pragma("GCC unroll 16")  // or the sums would not be in registers
constexpr int WIDE = 2;                       // LANES of a panel
constexpr int64_t PANEL = WIDE * LANES;       // columns that are packed together
constexpr int64_t CHUNK = 1024;               // of the depth: a panel's numbers stay in the second cache of a core
constexpr int64_t MANY_WEIGHTS = 1 << 17;     // times rows, from where another thread is worth waking
#ifdef __AVX512F__
constexpr int TALL = 12, FEW = 12;  // rows whose sums are in registers; beside what makes numbers of bytes
#else
constexpr int TALL = 3, FEW = 3;
#endif

// How numbers T of rows are multiplied: STEP of the depth at a time with as many of every column, side by side in a panel.
template <class T>
struct Form {
    typedef float Factor;
    typedef Lanes Column;
    static constexpr int STEP = 1;

    static void pack(const int8_t *weights, int64_t depth, int64_t columns, int64_t k, int8_t *to) {
        for (int64_t column = 0; column < PANEL; column++) to[column] = column < columns ? weights[column * depth + k] : 0;
    }

    struct Bytes {
        void columns(const int8_t *from, Lanes (&found)[WIDE]) const {
            typedef int8_t Eighths __attribute__((vector_size(LANES)));
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) {
                Eighths eighths;
                std::memcpy(&eighths, from + block * LANES, sizeof eighths);
                found[block] = __builtin_convertvector(eighths, Lanes);
            }
        }
    };

    static Lanes column(const float *from) { return load(from); }

    static Lanes add(Lanes sum, const float *row, Lanes column) { return sum + *row * column; }
};

#ifdef TABLES
// The two bytes of a bfloat16 that is a whole number up to 127.
struct Tables {
    alignas(64) uint8_t low[128], high[128];
    Tables() {
        for (int number = 0; number < 128; number++) {
            float value = number;
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            low[number] = bits >> 16, high[number] = bits >> 24;
        }
    }
};
const Tables TABLE;

template <>
struct Form<bfloat16> {
    typedef bfloat16 Factor;
    typedef __m512i Column;
    static constexpr int STEP = 2;

    // As sign and size. Interleaving the low with the high bytes of the lower and of the upper half of every 16 gives the pairs of
    // the first and of the second LANES columns.
    static void pack(const int8_t *weights, int64_t depth, int64_t columns, int64_t k, int8_t *to) {
        int8_t pairs[2 * PANEL] = {};
        int64_t there = std::min(columns, PANEL), numbers = std::min<int64_t>(2, depth - k);
        for (int64_t column = 0; column < there; column++) {
            int64_t place = column % LANES / 4 * 16 + column / LANES * 8 + column % 4 * 2;
            if (numbers == 2)
                std::memcpy(pairs + place, weights + column * depth + k, 2);
            else
                pairs[place] = weights[column * depth + k];
        }
        for (int64_t place = 0; place < 2 * PANEL; place++)
            to[place] = pairs[place] < 0 ? 0x80 | -pairs[place] : pairs[place];
    }

    struct Bytes {
        const __m512i low[2] = {_mm512_load_si512(TABLE.low), _mm512_load_si512(TABLE.low + 64)};
        const __m512i high[2] = {_mm512_load_si512(TABLE.high), _mm512_load_si512(TABLE.high + 64)};
        const __m512i sign = _mm512_set1_epi8(-128);

        void columns(const int8_t *from, __m512i (&found)[WIDE]) const {
            __m512i bytes = _mm512_loadu_si512(from);
            __m512i lows = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
            __m512i highs = _mm512_permutex2var_epi8(high[0], bytes, high[1]);
            highs = _mm512_ternarylogic_epi32(highs, bytes, sign, 0xf8);  // highs | (bytes & sign)
            found[0] = _mm512_unpacklo_epi8(lows, highs);
            found[1] = _mm512_unpackhi_epi8(lows, highs);
        }
    };

    static __m512i column(const bfloat16 *from) { return _mm512_loadu_si512(from); }

    static Lanes add(Lanes sum, const bfloat16 *row, __m512i column) {
        uint32_t pair;
        std::memcpy(&pair, row, sizeof pair);
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)column);
    }
};
#endif

// Adds to sums[row][column], for ROWS rows of `width` numbers and one panel, the products over `depth`.
template <class T, int ROWS, class Columns>
inline __attribute__((always_inline)) void multiply(
    const typename Form<T>::Factor *rows, int64_t width, int64_t depth, float *sums, Columns columns) {
    Lanes found[ROWS][WIDE];
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) found[row][block] = load(sums + row * PANEL + block * LANES);
    for (int64_t k = 0; k < depth; k += Form<T>::STEP) {
        typename Form<T>::Column of_panel[WIDE];
        columns(k, of_panel);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++)
                found[row][block] = Form<T>::add(found[row][block], rows + row * width + k, of_panel[block]);
    }
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) store(found[row][block], sums + row * PANEL + block * LANES);
}

// The same for any number of rows up to MOST.
template <class T, int MOST, class Columns>
void multiply_rows(
    int64_t count, const typename Form<T>::Factor *rows, int64_t width, int64_t depth, float *sums, Columns columns) {
    if constexpr (MOST > 1)
        if (count < MOST) return multiply_rows<T, MOST - 1>(count, rows, width, depth, sums, columns);
    multiply<T, MOST>(rows, width, depth, sums, columns);
}

// Rows as factors, `width` each: as they are, or with a 0 behind where the depth is odd, or as float32.
template <class T>
const typename Form<T>::Factor *factors(
    const T *x, int64_t rows, int64_t depth, int64_t width, std::vector<typename Form<T>::Factor> &kept) {
    typedef typename Form<T>::Factor Factor;
    if (std::is_same<T, Factor>::value && width == depth) return (const Factor *)x;
    kept.assign(rows * width, Factor{});
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < depth; k++) {
            if constexpr (std::is_same<T, Factor>::value)
                kept[row * width + k] = x[row * depth + k];
            else
                kept[row * width + k] = load_part(x + row * depth + k, 1)[0];
        }
    return kept.data();
}

template <class T>
void product(
    const T *x, const int8_t *packed, const float *scales, const float *biases, int64_t rows, int64_t depth, int64_t columns,
    T *y, int threads) {
    if (rows == 0) return;
    typedef Form<T> Its;
    int64_t width = (depth + Its::STEP - 1) / Its::STEP * Its::STEP, panels = (columns + PANEL - 1) / PANEL;
    std::vector<typename Its::Factor> kept;
    const typename Its::Factor *of_rows = factors(x, rows, depth, width, kept);
#pragma omp parallel for num_threads(threads) if (rows * columns * depth >= MANY_WEIGHTS)
    for (int64_t panel = 0; panel < panels; panel++) {
        thread_local std::vector<float> sums;
        thread_local std::vector<typename Its::Factor> numbers;
        sums.assign(rows * PANEL, 0);
        const int8_t *bytes = packed + panel * PANEL * width;
        typename Its::Bytes of_bytes;
        for (int64_t first = 0; first < width; first += CHUNK) {
            int64_t part = std::min(CHUNK, width - first);
            const int8_t *from = bytes + first * PANEL;
            if (rows <= FEW) {
                multiply_rows<T, FEW>(rows, of_rows + first, width, part, sums.data(), [&](int64_t k, auto &found) {
                    of_bytes.columns(from + k * PANEL, found);
                });
                continue;
            }
            numbers.resize(CHUNK * PANEL);
            auto *of_panel = numbers.data();
            for (int64_t k = 0; k < part; k += Its::STEP) {
                typename Its::Column found[WIDE];
                of_bytes.columns(from + k * PANEL, found);
                std::memcpy((void *)(of_panel + k * PANEL), found, sizeof found);
            }
            for (int64_t row = 0; row < rows; row += TALL)
                multiply_rows<T, TALL>(
                    std::min<int64_t>(TALL, rows - row), of_rows + row * width + first, width, part,
                    sums.data() + row * PANEL, [&](int64_t k, auto &found) {
                        for (int block = 0; block < WIDE; block++)
                            found[block] = Its::column(of_panel + k * PANEL + block * Its::STEP * LANES);
                    });
        }
        int64_t begin = panel * PANEL, there = std::min(PANEL, columns - begin);
        for (int64_t row = 0; row < rows; row++) {
            T ends[PANEL];
            for (int64_t i = 0; i < PANEL; i += LANES)
                store(load(sums.data() + row * PANEL + i) * load(scales + begin + i) + load(biases + begin + i), ends + i);
            std::memcpy((void *)(y + row * columns + begin), ends, there * sizeof(T));
        }
    }
}

template <class T>
void pack(const int8_t *weights, int64_t depth, int64_t columns, int8_t *packed, int threads) {
    constexpr int STEP = Form<T>::STEP;
    int64_t width = (depth + STEP - 1) / STEP * STEP, panels = (columns + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < depth; k += STEP)
            Form<T>::pack(
                weights + panel * PANEL * depth, depth, columns - panel * PANEL, k, packed + (panel * width + k) * PANEL);
}

}  // namespace

#define INT8_FUNCTIONS(TYPE, NAME)                                                                                          \
    extern "C" void pack_##NAME(const int8_t *weights, int64_t depth, int64_t columns, int8_t *packed, int threads) {       \
        pack<TYPE>(weights, depth, columns, packed, threads);                                                               \
    }                                                                                                                       \
    extern "C" void product_##NAME(                                                                                         \
        const TYPE *x, const int8_t *packed, const float *scales, const float *biases, int64_t rows, int64_t depth,         \
        int64_t columns, TYPE *y, int threads) {                                                                            \
        product<TYPE>(x, packed, scales, biases, rows, depth, columns, y, threads);                                         \
    }

INT8_FUNCTIONS(float, float32)
INT8_FUNCTIONS(bfloat16, bfloat16)
