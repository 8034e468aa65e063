// Products of rows with packed weights: numbers as they are, or of eight bits with one scale for every column of the output (a
// row of the weights).
//
// A column's sum runs over the depth in one order, whatever the number of rows and threads, so that a row's result depends on
// that row alone, to the bit. Columns are packed in panels, side by side. A tile of a panel stays in the first cache of a core
// while some rows after others are multiplied by it; meanwhile the next tile is fetched, so that reading weights and multiplying
// take no longer than the slower of the two. packed_products.py says what the arguments are.

#include "form.h"
#include "panels.h"

#if defined(PAIRS) && defined(__AVX512VBMI__)
#define TABLES  // bytes are looked up in tables of 128
#endif

namespace {

constexpr int64_t SHORT_TILE = 1 << 13;    // bytes, for up to three groups of rows
constexpr int64_t LONG_TILE = 3 << 13;     // bytes; sums are loaded and stored less often
constexpr int64_t FEW = 1;                 // rows that are multiplied in pairs as fast as in float32, or faster

// Rows of bfloat16 that are multiplied as float32, a number at a time.
struct single : bfloat16 {};

template <class T>
constexpr bool WIDENS = std::is_same<T, widened>::value;

#if defined(PAIRS) && defined(SLOW_PAIRS)
#define FEW_IN_PAIRS  // but more in float32
#endif

// While it lives, numbers below float32's normal ones are 0, as they are where the processor multiplies pairs.
template <class T>
struct Flushing {
#ifdef FEW_IN_PAIRS
    const unsigned before = _mm_getcsr();
    Flushing() {
        if (WIDENS<T>) _mm_setcsr(before | 0x8040);
    }
    ~Flushing() {
        if (WIDENS<T>) _mm_setcsr(before);
    }
#endif
};

// Weights that are packed as they are multiplied. Of packed weights, columns() reads STEP numbers of the depth of every column.
template <class T>
struct Whole {
    typedef typename std::conditional<WIDENS<T>, bfloat16, typename Form<T>::Factor>::type Weight, Packed;
    static constexpr int MOST = TALL;    // rows whose sums are in registers beside what columns() needs
    static constexpr int DIRECT = BAND;  // rows for which columns() is called again for every MOST of them
    static constexpr bool SCALED = false;

    // Packs STEP numbers, fewer at the end of the depth, of up to PANEL columns; missing ones are 0.
    static void pack(const Weight *weights, int64_t depth, int64_t columns, int64_t k, Packed *to) {
        constexpr int STEP = Form<T>::STEP;
        int64_t there = std::min(columns, PANEL), numbers = std::min<int64_t>(STEP, depth - k);
        if (there < PANEL || numbers < STEP) std::fill_n(to, PANEL * STEP, Weight{});
        for (int64_t column = 0; column < there; column++) {
            const Weight *from = weights + column * depth + k;
            Packed *place = to + column * STEP;
            if (numbers == STEP)
                std::memcpy((void *)place, from, STEP * sizeof(Weight));  // one instruction
            else
                std::memcpy((void *)place, from, numbers * sizeof(Weight));
        }
    }

    void columns(const Packed *from, typename Form<T>::Column (&found)[WIDE]) const {
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) found[block] = Form<T>::column(from + block * Form<T>::STEP * LANES);
    }
};

// Weights of eight bits. They become numbers in registers (one group of rows) or in a buffer of one tile (many rows).
template <class T>
struct Eighths {
    typedef int8_t Weight, Packed;
    static constexpr int MOST = TALL - 1, DIRECT = 2 * MOST;
    static constexpr bool SCALED = true;

    static void pack(const int8_t *weights, int64_t depth, int64_t columns, int64_t k, int8_t *to) {
        for (int64_t column = 0; column < PANEL; column++) to[column] = column < columns ? weights[column * depth + k] : 0;
    }

    void columns(const int8_t *from, Lanes (&found)[WIDE]) const {
        typedef int8_t Eight __attribute__((vector_size(LANES)));
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) {
            Eight eight;
            std::memcpy(&eight, from + block * LANES, sizeof eight);
            found[block] = __builtin_convertvector(eight, Lanes);
        }
    }
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
struct Eighths<bfloat16> {
    typedef int8_t Weight, Packed;
    static constexpr int MOST = TALL - 1, DIRECT = 2 * MOST;
    static constexpr bool SCALED = true;

    // As sign and size, 2 LANES columns after each other. Interleaving the low with the high bytes of the lower and of the upper
    // half of every 16 gives the pairs of the first and of the second LANES of them.
    static void pack(const int8_t *weights, int64_t depth, int64_t columns, int64_t k, int8_t *to) {
        int8_t pairs[2 * PANEL] = {};
        int64_t there = std::min(columns, PANEL), numbers = std::min<int64_t>(2, depth - k);
        for (int64_t column = 0; column < there; column++) {
            int64_t within = column % (2 * LANES);
            int64_t place = column / (2 * LANES) * 4 * LANES + within % LANES / 4 * 16 + within / LANES * 8 + within % 4 * 2;
            std::memcpy(pairs + place, weights + column * depth + k, numbers);
        }
        for (int64_t place = 0; place < 2 * PANEL; place++)
            to[place] = pairs[place] < 0 ? 0x80 | -pairs[place] : pairs[place];
    }

    const __m512i low[2] = {_mm512_load_si512(TABLE.low), _mm512_load_si512(TABLE.low + 64)};
    const __m512i high[2] = {_mm512_load_si512(TABLE.high), _mm512_load_si512(TABLE.high + 64)};
    const __m512i sign = _mm512_set1_epi8(-128);

    void columns(const int8_t *from, __m512i (&found)[WIDE]) const {
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block += 2) {
            __m512i bytes = _mm512_loadu_si512(from + block * 2 * LANES);
            __m512i lows = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
            __m512i highs = _mm512_permutex2var_epi8(high[0], bytes, high[1]);
            highs = _mm512_ternarylogic_epi32(highs, bytes, sign, 0xf8);  // highs | (bytes & sign)
            found[block] = _mm512_unpacklo_epi8(lows, highs);
            found[block + 1] = _mm512_unpackhi_epi8(lows, highs);
        }
    }
};

template <>
struct Eighths<widened> : Eighths<bfloat16> {
    void columns(const int8_t *from, Words (&found)[WIDE]) const {
        __m512i pairs[WIDE];
        Eighths<bfloat16>::columns(from, pairs);
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) found[block] = (Words)pairs[block];
    }
};
#endif

// A part of the depth that some rows are multiplied over.
template <class T, class W>
struct Part {
    const typename Form<T>::Factor *rows;  // `width` numbers each
    int64_t width, depth;
    const typename W::Packed *panel;
    bool first;         // of the depth: sums begin with 0
    const char *ahead;  // what is fetched meanwhile
};

// Adds to sums[row][column], for ROWS rows and one panel, the products of a part, and fetches LINES lines at each of its steps.
template <class T, class W, int LINES, int ROWS>
inline __attribute__((always_inline)) void multiply(const Part<T, W> &part, float *sums, const W &weights) {
    constexpr int STEP = Form<T>::STEP;
    Lanes found[ROWS][WIDE];
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++)
            found[row][block] = part.first ? Lanes{} : load(sums + row * PANEL + block * LANES);
    const char *ahead = part.ahead;
    for (int64_t k = 0; k < part.depth; k += STEP) {
        for (int line = 0; line < LINES; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);  // into the second cache
        typename Form<T>::Column columns[WIDE];
        weights.columns(part.panel + k * PANEL, columns);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++)
                found[row][block] = Form<T>::add(found[row][block], part.rows + row * part.width + k, columns[block]);
    }
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) store(found[row][block], sums + row * PANEL + block * LANES);
}

// The same for any number of rows, of which some groups fetch, between them, `lines` lines for each step of the part.
template <class T, class W>
void multiply_groups(int64_t rows, Part<T, W> part, float *sums, const W &weights, int64_t lines) {
    const auto *all = part.rows;
    in_groups(rows, W::MOST, lines, part.depth / Form<T>::STEP, part.ahead, [&](int64_t each, int64_t begin, int64_t count, auto ahead) {
        part.rows = all + begin * part.width, part.ahead = ahead;
        float *place = sums + begin * PANEL;
        with_rows<W::MOST>(count, [&](auto number) {
            constexpr int ROWS = number.value;
            if (each == 0)
                multiply<T, W, 0, ROWS>(part, place, weights);
            else if (each == 1)
                multiply<T, W, 1, ROWS>(part, place, weights);
            else
                multiply<T, W, 2, ROWS>(part, place, weights);
        });
    });
}

// Sums of up to BAND rows, `width` numbers each, with one panel.
template <class T, class W>
void sums_of_panel(
    const typename Form<T>::Factor *rows, int64_t count, int64_t width, const typename W::Packed *panel, float *sums) {
    typedef typename Whole<T>::Packed Number;
    constexpr int STEP = Form<T>::STEP;
    constexpr int64_t STEP_LINES = PANEL * STEP * sizeof(typename W::Packed) / LINE;
    const W weights;
    const Flushing<T> flushing;
    int64_t bytes = count <= 3 * TALL ? SHORT_TILE : LONG_TILE, tile = bytes / int64_t(PANEL * sizeof(Number));
    if (count <= W::MOST) tile = width;
    alignas(64) Number numbers[W::DIRECT < BAND ? LONG_TILE / sizeof(Number) : 1];
    for (int64_t k = 0; k < width; k += tile) {
        int64_t depth = std::min(tile, width - k);
        const auto *from = panel + k * PANEL;
        const char *next = (const char *)(from + depth * PANEL);
        if (count <= W::DIRECT) {
            multiply_groups<T, W>(count, {rows + k, width, depth, from, k == 0, next}, sums, weights, STEP_LINES);
            continue;
        }
        for (int64_t at = 0; at < depth; at += STEP) {
            typename Form<T>::Column found[WIDE];
            weights.columns(from + at * PANEL, found);
            std::memcpy((void *)(numbers + at * PANEL), found, sizeof found);
        }
        multiply_groups<T, Whole<T>>(count, {rows + k, width, depth, numbers, k == 0, next}, sums, {}, STEP_LINES);
    }
}

// Rows as factors, `width` each: as they are, or with a 0 behind where the depth is odd, or as float32.
template <class T>
const typename Form<T>::Factor *factors(
    const T *x, int64_t rows, int64_t depth, int64_t width, std::vector<typename Form<T>::Factor> &kept, int threads) {
    typedef typename Form<T>::Factor Factor;
    if (std::is_same<T, Factor>::value && width == depth) return (const Factor *)x;
    kept.resize(rows * width);
#pragma omp parallel for num_threads(threads) if (rows * depth >= MANY_WEIGHTS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * depth;
        Factor *to = kept.data() + row * width;
        if constexpr (std::is_same<T, Factor>::value) {
            std::memcpy((void *)to, from, depth * sizeof(T));
            std::fill(to + depth, to + width, Factor{});
        } else {
            int64_t k = 0;
            for (; k + LANES <= depth; k += LANES) store(load(from + k), to + k);
            if (k == width) continue;
            Lanes last = load_part(from + k, depth - k);
            std::memcpy((void *)(to + k), &last, (width - k) * sizeof(Factor));
        }
    }
    return kept.data();
}

// As packed_products.py has it.
struct Product {
    const void *x, *packed;
    const float *scales, *biases;
    int64_t depth, columns;
    void *y;
};

template <class T, class W>
void product(const Product &all, int64_t rows, int threads) {
    const T *x = (const T *)all.x;
    const auto *packed = (const typename W::Packed *)all.packed;
    const float *scales = all.scales, *biases = all.biases;
    T *y = (T *)all.y;
    int64_t depth = all.depth, columns = all.columns;
    int64_t step = Form<T>::STEP, width = (depth + step - 1) / step * step;
    int64_t bands = (rows + BAND - 1) / BAND;
    thread_local std::vector<typename Form<T>::Factor> kept;
    const auto *of_rows = factors(x, rows, depth, width, kept, threads);
    auto edge = [=](int64_t band) { return rows * band / bands; };
    bool parallel = rows * columns * depth >= MANY_WEIGHTS;
    divide(bands, panels_of(columns), parallel, threads, edge, [=](int64_t panel, int64_t, int64_t top, int64_t count) {
        alignas(64) float sums[BAND * PANEL];
        int64_t left = panel * PANEL;
        sums_of_panel<T, W>(of_rows + top * width, count, width, packed + left * width, sums);
        write(sums, count, W::SCALED ? scales : nullptr, biases, left, columns, y + top * columns);
    });
}

template <class T, class W>
void pack(const typename W::Weight *weights, int64_t depth, int64_t columns, typename W::Packed *packed, int threads) {
    constexpr int STEP = Form<T>::STEP;
    int64_t width = (depth + STEP - 1) / STEP * STEP, panels = panels_of(columns);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < width; k += STEP)
            W::pack(weights + panel * PANEL * depth, depth, columns - panel * PANEL, k, packed + (panel * width + k) * PANEL);
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }

// Rows of numbers T; up to FEW of them as OF_FEW, with the same results to the bit.
#define PRODUCT_FUNCTIONS(T, OF_FEW, WEIGHTS, NAME)                                                                   \
    extern "C" void pack_##NAME(                                                                                      \
        const WEIGHTS<T>::Weight *weights, int64_t depth, int64_t columns, WEIGHTS<T>::Packed *packed, int threads) { \
        pack<T, WEIGHTS<T>>(weights, depth, columns, packed, threads);                                                \
    }                                                                                                                 \
    extern "C" void product_##NAME(const Product *all, int64_t rows, int threads) {                                   \
        if (rows <= FEW)                                                                                              \
            product<OF_FEW, WEIGHTS<OF_FEW>>(*all, rows, threads);                                                    \
        else                                                                                                          \
            product<T, WEIGHTS<T>>(*all, rows, threads);                                                              \
    }

// Without AVX-512 the sums would not be in registers, and everything would take many times as long.
#ifdef __AVX512F__
#ifndef PAIRS
typedef widened many, few;
#elif defined(SLOW_PAIRS)
typedef widened many;
typedef bfloat16 few;
#else
typedef bfloat16 many, few;
#endif
PRODUCT_FUNCTIONS(float, float, Whole, whole_float32)
PRODUCT_FUNCTIONS(many, few, Whole, whole_bfloat16)
PRODUCT_FUNCTIONS(float, float, Eighths, int8_float32)
#ifdef TABLES
PRODUCT_FUNCTIONS(many, few, Eighths, int8_bfloat16)
#else
PRODUCT_FUNCTIONS(single, single, Eighths, int8_bfloat16)
#endif
#endif
