// How products of rows with packed columns are cut: into panels of columns and bands of rows, which threads share.
#pragma once

#include <omp.h>

#include "lanes.h"

#define ALL_AT_ONCE _Pragma("GCC unroll 32")  // or the sums would not be in registers

namespace {

constexpr int WIDE = 4, TALL = 6;          // LANES of a panel, and rows, whose sums are in registers together
constexpr int64_t PANEL = WIDE * LANES;    // columns that are packed together
constexpr int64_t BAND = 96;               // rows whose sums are kept for a panel
constexpr int64_t LINE = 64;               // bytes of memory that are fetched at a time
constexpr int64_t MANY_WEIGHTS = 1 << 17;  // times rows, from where another thread is worth waking

int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// Calls work(panel, first row of the band, row, rows) until all rows of all panels are done. Every thread has as many bands of panels
// as any other: those at the ends of its own are divided by their rows. edge(band) is the first row of a band.
template <class Edge, class Work>
void divide(int64_t bands, int64_t panels, bool parallel, int threads, Edge edge, Work work) {
    int64_t items = bands * panels;
#pragma omp parallel num_threads(threads) if (parallel)
    {
        int64_t shares = omp_get_num_threads(), begin = items * omp_get_thread_num(), end = begin + items;
        for (int64_t item = begin / shares; item * shares < end; item++) {
            int64_t band = item / panels, panel = item % panels, first = edge(band);
            int64_t of_band = edge(band + 1) - first, passed = item * shares;
            int64_t top = first + of_band * std::max<int64_t>(begin - passed, 0) / shares;
            int64_t count = first + of_band * std::min(end - passed, shares) / shares - top;
            if (count > 0) work(panel, first, top, count);
        }
    }
}

// Calls work(lines, first row, rows, ahead) for groups of up to `most` rows. Some groups fetch `lines` lines of memory for each of
// the steps of a part of the depth, from `ahead` on, `all` lines between them: with few groups each fetches more. One group alone
// fetches nothing: its panel is read in one go, as the processor foresees.
template <class Work>
void in_groups(int64_t rows, int64_t most, int64_t all, int64_t steps, const char *ahead, Work work) {
    int64_t groups = (rows + most - 1) / most;
    int64_t fetching = groups == 1 ? 0 : std::min(all, groups < 4 ? int64_t{2} : int64_t{4});
    int64_t each = fetching ? all / fetching : 0;
    for (int64_t group = 0; group < groups; group++) {
        int64_t begin = rows * group / groups, count = rows * (group + 1) / groups - begin;
        work(group < fetching ? each : 0, begin, count, ahead);
        ahead += steps * each * LINE;
    }
}

// Calls the function object with the number of rows, up to MOST, as a constant.
template <int MOST, class Work>
inline __attribute__((always_inline)) void with_rows(int64_t rows, Work work) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, work);
    work(std::integral_constant<int, MOST>{});
}

// Writes sums of a panel, [rows][PANEL], as rows of `columns` numbers, from column `left` on.
template <class T>
void write(const float *sums, int64_t rows, const float *scales, const float *biases, int64_t left, int64_t columns, T *y) {
    for (int64_t row = 0; row < rows; row++) {
        T ends[PANEL];
        for (int64_t i = 0; i < PANEL; i += LANES) {
            Lanes sum = load(sums + row * PANEL + i);
            if (scales) sum *= load(scales + left + i);
            if (biases) sum += load(biases + left + i);
            store(sum, ends + i);
        }
        std::memcpy((void *)(y + row * columns + left), ends, std::min(PANEL, columns - left) * sizeof(T));
    }
}

}  // namespace
