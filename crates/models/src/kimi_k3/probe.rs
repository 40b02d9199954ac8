//! Looking into a pass without touching it.

use kernels::{Backend, Routes};

/// Watches a pass, layer by layer. What it is shown is never read back, so a pass has the same bits with and without one.
pub trait Probe<B: Backend> {
    /// Comes after each layer with the stream (the running sum since the last block boundary, `[rows, H]`) and the routes taken;
    /// a dense layer has none.
    fn layer(&mut self, layer: usize, stream: &B::Act, routes: Option<&Routes>);

    /// Experts a row for which the routes of the next layer are to be guessed. Where there are none, nothing is
    /// computed.
    fn guess_widths(&self) -> &[usize] {
        &[]
    }

    /// Comes after [`layer`](Probe::layer) of the layer before with the routes that `layer` would take if its attention added
    /// nothing, one for each of the widths, and none beyond the number of experts. Layers without a router are left out.
    fn guesses(&mut self, layer: usize, guesses: &[Routes]) {
        let _ = (layer, guesses);
    }
}
