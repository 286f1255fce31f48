//! Supplementary groups of a container's program, by number or by name in the image's `/etc/group`.

use anyhow::Context as _;
use podvisor_images::Image;

/// Where an image names its groups.
const DATABASE: &str = "/etc/group";

/// Most bytes of it that are read.
const MOST: u64 = 1 << 20;

/// A group as it is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Group {
    Number(u32),
    Name(String),
}

/// Parses a group: what is no number is a name.
pub(super) fn parse(text: &str) -> Result<Group, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        // This one means "none" to the kernel.
        Ok(number) if number < u32::MAX => Ok(Group::Number(number)),
        _ if text.is_empty() || is_number || text.contains([':', '\n']) => {
            Err("write the name of a group, or its number, which is below 4294967295".to_owned())
        }
        _ => Ok(Group::Name(text.to_owned())),
    }
}

/// Returns the numbers of groups, with the names of an image.
pub(super) fn numbers(groups: &[Group], image: &Image) -> anyhow::Result<Vec<u32>> {
    numbers_by(groups, || {
        let mut database = Vec::new();
        image
            .copy_file(DATABASE, &mut database, MOST)
            .with_context(|| {
                format!("--group-add: cannot read the image's {DATABASE}; write numbers")
            })?;
        Ok(database)
    })
}

fn numbers_by(
    groups: &[Group],
    read: impl FnOnce() -> anyhow::Result<Vec<u8>>,
) -> anyhow::Result<Vec<u32>> {
    let has_names = groups.iter().any(|group| matches!(group, Group::Name(_)));
    let database = if has_names { read()? } else { Vec::new() };
    let number = |group: &Group| match group {
        Group::Number(number) => Ok(*number),
        Group::Name(name) => find(&database, name).with_context(|| {
            format!("--group-add: the image's {DATABASE} has no group {name}; write its number")
        }),
    };
    groups.iter().map(number).collect()
}

/// Finds a group in lines of `NAME:PASSWORD:NUMBER:MEMBERS`.
fn find(database: &[u8], name: &str) -> Option<u32> {
    database.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let is_it = fields.next() == Some(name.as_bytes());
        let number = std::str::from_utf8(fields.nth(1)?).ok()?;
        is_it.then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_a_number_or_a_name_of_the_image() {
        let groups = ["7", "audio", "video"].map(|text| parse(text).unwrap());
        let database = b"root:x:0:\naudio:x:29:a,b\n\nbad\nvideo:x:-:\nvideo:x:44:\n".to_vec();
        let found = numbers_by(&groups, || Ok(database.clone())).unwrap();
        assert_eq!(found, [7, 29, 44]);
        let missing = [parse("aud").unwrap()];
        let error = numbers_by(&missing, || Ok(database)).unwrap_err();
        assert!(error.to_string().contains("no group aud"), "{error}");
        // Without a name nothing is read.
        assert_eq!(numbers_by(&groups[..1], || unreachable!()).unwrap(), [7]);
        for bad in ["", "4294967295", "99999999999", "a:b", "a\nb"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
