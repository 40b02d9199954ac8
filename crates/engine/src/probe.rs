//! Looking into a pass without touching it.

use kernels::{Backend, Cpu, Routes, Rows};

/// Watches a pass, layer by layer. What it is shown is never read back, so a pass has the same bits with and without one.
///
/// A closure that takes what [`layer`](Probe::layer) takes is a probe.
pub trait Probe {
    /// Comes after each layer with the stream, `[rows, hidden]`, and the routes taken; a dense layer has none. The rows
    /// are those of the pass, in its order.
    fn layer(&mut self, layer: usize, stream: &[f32], routes: Option<&Routes>);

    /// Whether streams are looked at. Where they are not, [`layer`](Probe::layer) gets an empty one, and nothing is copied.
    fn wants_streams(&self) -> bool {
        true
    }

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

impl<F: FnMut(usize, &[f32], Option<&Routes>)> Probe for F {
    fn layer(&mut self, layer: usize, stream: &[f32], routes: Option<&Routes>) {
        self(layer, stream, routes);
    }
}

/// A probe that only hears which layer, from 0, is done.
pub struct LayerProbe<'a>(pub &'a mut dyn FnMut(usize));

impl Probe for LayerProbe<'_> {
    fn layer(&mut self, layer: usize, _: &[f32], _: Option<&Routes>) {
        (self.0)(layer);
    }

    fn wants_streams(&self) -> bool {
        false
    }
}

/// Shows a probe what the model shows, as plain numbers.
pub(crate) struct Watcher<'a> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) probe: &'a mut dyn Probe,
}

impl models::kimi_k3::Probe<Cpu> for Watcher<'_> {
    fn layer(&mut self, layer: usize, stream: &Rows, routes: Option<&Routes>) {
        let stream = match self.probe.wants_streams() {
            true => self.cpu.download(stream),
            false => Default::default(),
        };
        self.probe.layer(layer, &stream, routes);
    }

    fn guess_widths(&self) -> &[usize] {
        self.probe.guess_widths()
    }

    fn guesses(&mut self, layer: usize, guesses: &[Routes]) {
        self.probe.guesses(layer, guesses);
    }
}
