//! Trees of files as lines of text, one per file: its path, then `name=value` pairs, separated by
//! tabs; bytes that are not printable ASCII, and the backslash, are written `\ooo`.

use std::collections::{BTreeMap, BTreeSet};

/// Files by path, each with its attributes by name.
pub(crate) type Tree = BTreeMap<String, BTreeMap<String, String>>;

/// Prints a listing of the container's root with Debian's tools: records that end in a zero byte,
/// in three parts.
pub(crate) const LIST: &str = r"
set -e
find / -xdev -printf '%p\0%y\0%m\0%U\0%G\0%n\0%T@\0%s\0%l\0'
printf '== devices\0'
find / -xdev \( -type b -o -type c \) -exec stat --printf '%n\0%t:%T\0' {} +
printf '== sums\0'
find / -xdev -type f -exec sha256sum --zero {} +
printf '== attributes\0'
find / -xdev -print0 | xargs -0 \
    getfattr --absolute-names -h -d -m '^(user|security|system.posix_acl_)' -e hex --
";

/// Parses the output of [`LIST`].
pub(crate) fn parse_guest(output: &[u8]) -> Tree {
    let mut tree = Tree::new();
    let mut words = output.split(|byte| *byte == 0);
    let mut until = |mark: &str| -> Vec<String> {
        let word = words.by_ref().map(escape);
        word.take_while(|word| word != mark).collect()
    };
    for record in until("== devices").chunks_exact(9) {
        let [path, kind, mode, uid, gid, links, time, size, target] = record else {
            unreachable!("chunks of nine");
        };
        let mut file = BTreeMap::new();
        let mut set = |name: &str, value: String| file.insert(name.to_owned(), value);
        set("type", kind.clone());
        set("mode", format!("{mode:0>4}"));
        set("uid", uid.clone());
        set("gid", gid.clone());
        set("links", links.clone());
        // find has a tenth digit of nanoseconds.
        let (seconds, fraction) = time.split_once('.').unwrap();
        set("mtime", format!("{seconds}.{}", &fraction[..9]));
        match kind.as_str() {
            "f" => set("size", size.clone()),
            "l" => set("target", target.clone()),
            _ => None,
        };
        tree.insert(path.clone(), file);
    }
    let mut put = |path: &str, name: &str, value: &str| {
        let file = tree.get_mut(path);
        let file = file.unwrap_or_else(|| panic!("{path} was not listed"));
        file.insert(name.to_owned(), value.to_owned());
    };
    for record in until("== sums").chunks_exact(2) {
        put(&record[0], "device", &record[1]);
    }
    for record in until("== attributes") {
        if let Some((sum, path)) = record.split_once("  ") {
            put(path, "sha256", sum);
        }
    }
    // getfattr writes lines, in which only the necessary bytes of names are escaped.
    let rest: Vec<&[u8]> = words.collect();
    let mut path = String::new();
    for line in rest.concat().split(|byte| *byte == b'\n') {
        if let Some(file) = line.strip_prefix(b"# file: ") {
            path = escape(&unescape(file));
        } else if !line.is_empty() {
            let line = escape(line);
            // An attribute may have no value.
            let (name, value) = line.split_once('=').unwrap_or((&line, "0x"));
            put(&path, name, value);
        }
    }
    tree
}

/// Parses a listing of a directory of this machine.
pub(crate) fn parse_listing(text: &str) -> Tree {
    let file = |line: &str| {
        let mut fields = line.split('\t');
        let path = fields.next().unwrap().to_owned();
        let pairs = fields.filter_map(|field| field.split_once('='));
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        (path, pairs.collect())
    };
    text.lines().map(file).collect()
}

/// Returns the differences as text, one per line.
pub(crate) fn differences(expected: &Tree, found: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    let paths: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    for path in paths {
        let (expected, found) = match (expected.get(path), found.get(path)) {
            (Some(expected), Some(found)) => (expected, found),
            (Some(_), None) => {
                lines.push(format!("{path}: missing in the guest"));
                continue;
            }
            (None, _) => {
                lines.push(format!("{path}: only in the guest"));
                continue;
            }
        };
        let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
        for name in names {
            let value = |file: &BTreeMap<String, String>| {
                file.get(name).map_or("nothing".to_owned(), String::clone)
            };
            let (expected, found) = (value(expected), value(found));
            if expected != found {
                lines.push(format!(
                    "{path}: {name} is {found} in the guest instead of {expected}"
                ));
            }
        }
    }
    lines
}

/// Decodes `\ooo` into bytes.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match rest {
            [a, b, c, after @ ..] if *byte == b'\\' => {
                let digits = [a, b, c].map(|digit| digit - b'0');
                bytes.push(digits[0] << 6 | digits[1] << 3 | digits[2]);
                rest = after;
            }
            _ => bytes.push(*byte),
        }
    }
    bytes
}

fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'\\' | 0..0x20 | 0x7f.. => text.push_str(&format!("\\{byte:03o}")),
            byte => text.push(char::from(*byte)),
        }
    }
    text
}
