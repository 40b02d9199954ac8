use super::{LANES, Lane, PANEL_BLOCKS, PANEL_LANES};
use crate::format::BLOCK;

/// Activation rows arranged for the canonical order: per block of 32 columns the 16 even ones, then the 16 odd ones.
///
/// The blocks of a row come in panels of `PANEL_BLOCKS`; a panel holds its part of all rows, row after row, so that any few
/// rows of a panel are one piece of memory. The last panel of a row may be partly unused.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    rows: usize,
    cols: usize,
    data: Vec<Lane>,
}

impl Packed {
    /// Arranges `rows` rows of `cols` numbers; `row(i)` gives the i-th. Memory is reused from call to call.
    pub fn pack<'a>(&mut self, rows: usize, cols: usize, row: impl Fn(usize) -> &'a [f32]) {
        let slots = self.resize(rows, cols);
        for i in 0..rows {
            // SAFETY: nobody else holds the slots.
            unsafe { slots.fill(i, 0, &row(i)[..cols]) }
        }
    }

    /// Makes room for `rows` rows of `cols` numbers, to be filled through the result; what was there is lost.
    pub(crate) fn resize(&mut self, rows: usize, cols: usize) -> Slots<'_> {
        (self.rows, self.cols) = (rows, cols);
        let need = cols.div_ceil(BLOCK).div_ceil(PANEL_BLOCKS) * rows * PANEL_LANES;
        if self.data.len() < need {
            self.data.resize(need, Lane::default());
        }
        Slots {
            base: self.data.as_mut_ptr(),
            rows,
            cols,
            owner: std::marker::PhantomData,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The even and the odd columns of one block of one row.
    pub(super) fn block(&self, row: usize, block: usize) -> &[Lane] {
        assert!(row < self.rows && block < self.cols.div_ceil(BLOCK));
        &self.data[(block / PANEL_BLOCKS * self.rows + row) * PANEL_LANES..][2 * (block % PANEL_BLOCKS)..][..2]
    }

    /// The rows of one panel, `PANEL_LANES` lanes each.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn panel(&self, panel: usize) -> &[Lane] {
        &self.data[panel * self.rows * PANEL_LANES..][..self.rows * PANEL_LANES]
    }
}

/// The places of packed rows, to be filled by several threads.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    base: *mut Lane,
    rows: usize,
    cols: usize,
    owner: std::marker::PhantomData<&'a mut [Lane]>,
}

// SAFETY: a plain address; `fill`'s contract keeps threads apart.
unsafe impl Send for Slots<'_> {}
// SAFETY: as above.
unsafe impl Sync for Slots<'_> {}

impl Slots<'_> {
    /// Sets the columns of `row` from block `first` on. Only the last block of the row may be partial; it is filled up
    /// with zeros.
    ///
    /// # Safety
    /// Nobody else touches these blocks meanwhile.
    pub(crate) unsafe fn fill(self, row: usize, first: usize, values: &[f32]) {
        let end = first * BLOCK + values.len();
        assert!(row < self.rows && end <= self.cols && (values.len().is_multiple_of(BLOCK) || end == self.cols));
        for (block, values) in (first..).zip(values.chunks(BLOCK)) {
            let at = (block / PANEL_BLOCKS * self.rows + row) * PANEL_LANES + 2 * (block % PANEL_BLOCKS);
            // SAFETY: the block is one of the row's, so that `resize` made room for its two lanes; nobody else holds them.
            let [even, odd] = unsafe { &mut *self.base.add(at).cast::<[Lane; 2]>() };
            if let Some(values) = values.as_array::<BLOCK>() {
                for l in 0..LANES {
                    even.0[l] = values[2 * l];
                    odd.0[l] = values[2 * l + 1];
                }
            } else {
                (*even, *odd) = Default::default();
                for (c, &v) in values.iter().enumerate() {
                    (if c % 2 == 0 { &mut *even } else { &mut *odd }).0[c / 2] = v;
                }
            }
        }
    }
}
