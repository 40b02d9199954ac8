//! Placeholder of the workspace layout.

pub mod tokenizer;
