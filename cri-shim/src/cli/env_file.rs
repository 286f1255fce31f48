//! Environment variables and labels of `run`, `exec` and others: from flags, and from files.

use std::fs::File;
use std::io::Read as _;

/// Expands `NAME` to podvisor's own value; without one, `NAME` removes the variable.
pub(super) fn from_here(entry: &str) -> String {
    match std::env::var(entry) {
        Ok(value) if !entry.contains('=') => format!("{entry}={value}"),
        _ => entry.to_owned(),
    }
}

/// Splits `KEY=VALUE`, or `KEY` for an empty value.
pub(super) fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    match key.is_empty() {
        true => Err("write KEY=VALUE".to_owned()),
        false => Ok((key.to_owned(), value.to_owned())),
    }
}

/// Environment variables of a file.
#[derive(Debug, Clone)]
pub(super) struct EnvFile(pub(super) Vec<String>);

/// Labels of a file.
#[derive(Debug, Clone)]
pub(super) struct LabelFile(pub(super) Vec<(String, String)>);

/// Returns the lines of a file's text that are neither empty nor comments, after checking their
/// names as docker does.
fn lines<'a>(path: &str, text: &'a str) -> Result<Vec<&'a str>, String> {
    // Editors of other systems begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().map(str::trim_start);
    let lines = (1..).zip(lines);
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(number, line)| match check_name(line) {
            Ok(()) => Ok(line),
            Err(error) => Err(format!("{path}:{number}: {error}")),
        })
        .collect()
}

fn check_name(line: &str) -> Result<(), String> {
    let name = line.split_once('=').map_or(line, |(name, _)| name);
    if name.is_empty() {
        return Err(format!("`{line}` has no name; write NAME=VALUE"));
    }
    if name.contains(char::is_whitespace) {
        return Err(format!(
            "the name `{name}` contains white space; write NAME=VALUE, without spaces in the name \
             and before the `=`"
        ));
    }
    Ok(())
}

/// Largest file, in bytes. It may be a device or a pipe that never ends.
const MAX_BYTES: u64 = 1 << 20;

fn read(path: &str) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut file = file.take(MAX_BYTES + 1);
    let read = file.read_to_string(&mut text);
    if file.limit() == 0 {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    read.map_err(|error| error.to_string())?;
    Ok(text)
}

/// Reads lines `NAME=VALUE`, or `NAME` for podvisor's own value.
pub(super) fn read_env(path: &str) -> Result<EnvFile, String> {
    let text = read(path)?;
    let lines = lines(path, &text)?.into_iter();
    Ok(EnvFile(lines.map(from_here).collect()))
}

/// Reads lines `KEY=VALUE`.
pub(super) fn read_labels(path: &str) -> Result<LabelFile, String> {
    let text = read(path)?;
    let labels = lines(path, &text)?.into_iter().map(parse_label);
    Ok(LabelFile(labels.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let error = read_env("/dev/zero").unwrap_err();
        assert!(error.contains("more than"), "{error}");
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "\u{feff}A=1\r\nB=\u{feff}2\r\n").unwrap();
        let EnvFile(env) = read_env(path).unwrap();
        assert_eq!(env, ["A=1", "B=\u{feff}2"]);
        let LabelFile(labels) = read_labels(path).unwrap();
        assert_eq!(labels[0], ("A".to_owned(), "1".to_owned()));
        fs::write(path, "\u{feff}# a comment\n").unwrap();
        assert!(read_env(path).unwrap().0.is_empty());
    }

    #[test]
    fn a_name_with_white_space_is_refused_with_its_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for bad in ["FOO = bar", "FOO =bar", "A B=c", "FOO ", "A\tB"] {
            fs::write(path, format!("# x\n\nGOOD= with spaces \n{bad}\n")).unwrap();
            let errors = [read_env(path).map(drop), read_labels(path).map(drop)];
            for error in errors.map(Result::unwrap_err) {
                assert!(error.starts_with(&format!("{path}:4: ")), "{error}");
                assert!(error.contains("white space"), "{bad}: {error}");
            }
        }
    }

    #[test]
    fn a_variable_without_a_value_takes_it_from_here() {
        let path = std::env::var("PATH").unwrap();
        assert_eq!(from_here("PATH"), format!("PATH={path}"));
        assert_eq!(from_here("PATH=x"), "PATH=x");
        assert_eq!(from_here("PODVISOR_NO_SUCH"), "PODVISOR_NO_SUCH");
    }
}
