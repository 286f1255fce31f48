//! User-data, meta-data and networks that users write, and the disk that is made of them.

use podvisor_cloud_init::fat::{self, Volume};
use podvisor_cloud_init::yaml::Node;
use podvisor_cloud_init::{Form, GuestFile, GuestSeed, NetworkConfig, UserData};

/// The first byte chooses the form and what the rest is. A seed is refused, or its disk is read
/// back.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    if first & 0x80 != 0 {
        return volume(rest);
    }
    // Parts end with a zero.
    let mut parts = rest.split(|byte| *byte == 0);
    let mut text = || String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
    let (one, two, three) = (text(), text(), text());
    for text in [&one, &two] {
        if let Ok(node) = Node::parse(text) {
            let written = node.write();
            let again = Node::parse(&written).map(|node| node.write());
            assert_eq!(again.as_ref(), Ok(&written), "{text:?}");
        }
    }
    let user_data = match first & 3 {
        0 => UserData::Document(one.clone().into_bytes()),
        1 => UserData::Script(one.clone()),
        _ => UserData::Merged {
            source: [("users".to_owned(), one.clone())].into(),
            inline: Some(three.clone()),
            overwrite: first & 3 == 2,
        },
    };
    let files = GuestFile {
        path: format!("/{one}"),
        content: two.clone().into_bytes(),
        mode: 0o600,
    };
    let seed = GuestSeed {
        form: if first & 4 == 0 {
            Form::NoCloud
        } else {
            Form::ConfigDrive
        },
        instance_id: "fuzz".to_owned(),
        host_name: "fuzz".to_owned(),
        meta_data: Some(two),
        user_data,
        network: if first & 8 == 0 {
            NetworkConfig::None
        } else {
            NetworkConfig::Document(three)
        },
        files: if first & 16 == 0 {
            Vec::new()
        } else {
            vec![files]
        },
        ..GuestSeed::default()
    };
    if let Ok(volume) = seed.volume() {
        read_back(&volume);
    }
}

/// Files of any names and contents.
fn volume(data: &[u8]) {
    let Ok(mut volume) = Volume::new("fuzz") else {
        return;
    };
    let mut parts = data.split(|byte| *byte == 0);
    while let (Some(path), Some(content)) = (parts.next(), parts.next()) {
        // What is refused is not on the volume.
        let _ = volume.add(&String::from_utf8_lossy(path), content.to_vec());
    }
    read_back(&volume);
}

fn read_back(volume: &Volume) {
    let mut image = Vec::new();
    if volume.write(&mut image).is_err() {
        return;
    }
    let (_, mut files) = fat::read::read(&image).expect("a volume");
    files.sort();
    let mut expected: Vec<(String, Vec<u8>)> = volume
        .files()
        .map(|(path, content)| (path.to_owned(), content.to_vec()))
        .collect();
    expected.sort();
    assert_eq!(files, expected);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("cloud_init", super::run);
    }
}
