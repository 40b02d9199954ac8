//! Token ids on the command line: `1008,10484,318`.

/// Ids in their order, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids(pub Vec<u32>);

/// Takes whole numbers with commas between them; blanks around a number do not matter.
pub fn parse(text: &str) -> Result<Ids, String> {
    let id = |part: &str| {
        part.trim()
            .parse()
            .map_err(|_| format!("found {part:?}, expected whole numbers with commas between, such as 1008,10484,318"))
    };
    text.split(',').map(id).collect::<Result<_, _>>().map(Ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_taken_and_anything_else_named() {
        assert_eq!(parse("7"), Ok(Ids(vec![7])));
        assert_eq!(parse("1, 2,4294967295"), Ok(Ids(vec![1, 2, u32::MAX])));
        for (text, found) in [
            ("", "\"\""),
            ("1,", "\"\""),
            ("1,x", "\"x\""),
            ("1,-2", "\"-2\""),
            ("4294967296", "\"4294967296\""),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(&format!("found {found}, expected")), "{error}");
        }
    }
}
