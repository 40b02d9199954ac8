//! What `compare` shows.

use std::fmt::Write;

use engine::{KvFormat, TrunkFormat, human};
use instruments::{LayerAgreement, LogitsTally, Ratio};
use serde_json::{Value, json};

use crate::output::{grouped, percent};

/// One of the two.
pub struct Side {
    pub trunk: TrunkFormat,
    pub kv: KvFormat,
    pub trunk_bytes: u64,
}

impl Side {
    fn name(&self) -> String {
        format!("trunk {}; latents {}", self.trunk.label(), self.kv)
    }
}

/// The comparison: the first side is the exact one.
pub struct Report {
    pub texts: usize,
    pub sides: [Side; 2],
    pub logits: LogitsTally,
    pub routes: Vec<LayerAgreement>,
}

impl Report {
    fn all_routes(&self) -> LayerAgreement {
        LayerAgreement {
            layer: 0,
            sets: Ratio::sum(self.routes.iter().map(|layer| layer.sets)),
            experts: Ratio::sum(self.routes.iter().map(|layer| layer.experts)),
        }
    }

    fn first_difference(&self) -> Option<usize> {
        let differs = |layer: &&LayerAgreement| layer.sets.hits < layer.sets.of;
        self.routes.iter().find(differs).map(|layer| layer.layer)
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_text(&mut text);
        text
    }

    fn write_text(&self, text: &mut String) -> std::fmt::Result {
        let [one, other] = &self.sides;
        let logits = &self.logits;
        writeln!(
            text,
            "{} text(s), {} tokens, each side fed the same ones.\n",
            grouped(self.texts as u64),
            grouped(logits.rows())
        )?;
        writeln!(text, "| | {} | {} |\n|---|---:|---:|", one.name(), other.name())?;
        writeln!(
            text,
            "| trunk in memory | {} | {} |",
            human(one.trunk_bytes),
            human(other.trunk_bytes)
        )?;
        if let Some([loss, other_loss]) = logits.losses() {
            writeln!(text, "| loss, nats a token | {loss:.6} | {other_loss:.6} |")?;
            writeln!(text, "| perplexity | {:.4} | {:.4} |", loss.exp(), other_loss.exp())?;
            writeln!(
                text,
                "\nloss: {:+.6} nats a token, perplexity x {:.6}, over {} tokens that follow another",
                other_loss - loss,
                (other_loss - loss).exp(),
                grouped(logits.predicted())
            )?;
        }
        writeln!(
            text,
            "logits: differ by {:.4e} at most, {:.4e} in root mean square; divergence {:.4e} nats a token; the most likely token is the same for {}",
            logits.largest(),
            logits.root_mean_square().unwrap_or(0.0),
            logits.divergence().unwrap_or(0.0),
            percent(logits.agreement().value())
        )?;
        let all = self.all_routes();
        let first = match self.first_difference() {
            Some(layer) => format!("the first layer that differs is {layer}"),
            None => "no layer differs".to_owned(),
        };
        writeln!(
            text,
            "routes: {} of the sets are the same, {} of the experts; {first}\n",
            percent(all.sets.value()),
            percent(all.experts.value())
        )?;
        writeln!(text, "| layer | same sets | same experts |\n|---:|---:|---:|")?;
        for layer in &self.routes {
            writeln!(
                text,
                "| {} | {} | {} |",
                layer.layer,
                percent(layer.sets.value()),
                percent(layer.experts.value())
            )?;
        }
        Ok(())
    }

    pub fn json(&self) -> Value {
        let logits = &self.logits;
        let losses = logits.losses();
        let side = |place: usize| {
            let side = &self.sides[place];
            json!({
                "trunk": side.trunk.label(),
                "kv": side.kv.name(),
                "trunk_bytes": side.trunk_bytes,
                "loss": losses.map(|losses| losses[place]),
            })
        };
        let all = self.all_routes();
        let layer = |layer: &LayerAgreement| json!({"layer": layer.layer, "same_sets": layer.sets.value(), "same_experts": layer.experts.value()});
        let difference = losses.map(|[loss, other]| other - loss);
        json!({
            "texts": self.texts,
            "tokens": logits.rows(),
            "sides": [side(0), side(1)],
            "loss": {
                "tokens": logits.predicted(),
                "difference": difference,
                "perplexity_ratio": difference.map(f64::exp),
            },
            "logits": {
                "largest_difference": logits.largest(),
                "rms_difference": logits.root_mean_square(),
                "divergence": logits.divergence(),
                "same_most_likely": logits.agreement().value(),
            },
            "routes": {
                "same_sets": all.sets.value(),
                "same_experts": all.experts.value(),
                "first_layer_that_differs": self.first_difference(),
                "layers": self.routes.iter().map(layer).collect::<Vec<_>>(),
            },
        })
    }
}
