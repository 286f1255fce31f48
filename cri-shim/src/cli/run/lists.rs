//! Files with environment variables or labels, for `run`.

use std::fs;

use super::args::{from_here, parse_label};

/// Environment variables of a file.
#[derive(Debug, Clone)]
pub(super) struct EnvFile(pub(super) Vec<String>);

/// Labels of a file.
#[derive(Debug, Clone)]
pub(super) struct LabelFile(pub(super) Vec<(String, String)>);

/// Returns the lines of a file that are neither empty nor comments.
fn lines(path: &str) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let lines = text.lines().map(str::trim_start);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}

/// Reads lines `NAME=VALUE`, or `NAME` for podvisor's own value.
pub(super) fn read_env(path: &str) -> Result<EnvFile, String> {
    let lines = lines(path)?;
    if let Some(bad) = lines.iter().find(|line| line.starts_with('=')) {
        return Err(format!("`{bad}` has no name"));
    }
    Ok(EnvFile(lines.iter().map(|line| from_here(line)).collect()))
}

/// Reads lines `KEY=VALUE`.
pub(super) fn read_labels(path: &str) -> Result<LabelFile, String> {
    let labels = lines(path)?;
    let labels: Result<_, _> = labels.iter().map(|line| parse_label(line)).collect();
    Ok(LabelFile(labels?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_comments_and_values_as_they_are_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "# a\n\n  A=1 # x\nB=\"q\"\nPODVISOR_NO_SUCH\n").unwrap();
        let EnvFile(env) = read_env(path).unwrap();
        assert_eq!(env, ["A=1 # x", "B=\"q\"", "PODVISOR_NO_SUCH"]);
        let LabelFile(labels) = read_labels(path).unwrap();
        assert_eq!(labels[0], ("A".to_owned(), "1 # x".to_owned()));
        fs::write(path, "=x\n").unwrap();
        assert!(read_env(path).is_err() && read_labels(path).is_err());
        assert!(read_env("/no/such/file").is_err());
    }
}
