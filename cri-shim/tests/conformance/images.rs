//! The image service.

use podvisor_cri_messages::*;
use tonic::Code;

use crate::client::ask_images;
use crate::fixture::RUNTIME;
use crate::pod::image;

fn spec(name: &str) -> Option<ImageSpec> {
    Some(ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    })
}

fn status(name: &str) -> Option<Image> {
    ask_images!(image_status(ImageStatusRequest {
        image: spec(name),
        verbose: false,
    }))
    .unwrap()
    .image
}

#[test]
fn guest_images_are_pulled_listed_and_known_by_each_of_their_names() {
    let name = image("user").image;
    let found = status(&name).expect("it was pulled");
    assert!(found.repo_tags.contains(&name), "{found:?}");
    assert!(found.size > 0);
    assert_eq!(found.uid.as_ref().map(|uid| uid.value), Some(1000));
    let digest = found.repo_digests.first().expect("a digest").clone();
    assert!(digest.contains("@sha256:"), "{digest}");
    for other in [&found.id, &digest] {
        assert_eq!(status(other).map(|image| image.id), Some(found.id.clone()));
    }
    let listed = ask_images!(list_images(ListImagesRequest {
        filter: Some(ImageFilter { image: spec(&name) }),
    }))
    .unwrap();
    let is_it = |image: &Image| image.id == found.id;
    assert!(listed.images.iter().any(is_it));
    // Containerd 1.6 lists all images regardless of the filter.
    assert!(listed.images.iter().all(is_it) || !RUNTIME.is_vm);
    let all = ask_images!(list_images(ListImagesRequest { filter: None })).unwrap();
    assert!(all.images.iter().any(|image| image.id == found.id));
}

#[test]
fn guest_images_are_for_runtime_handlers_that_there_are() {
    let of = |handler: &str| {
        let mut image = image("plain");
        image.runtime_handler = handler.to_owned();
        ask_images!(image_status(ImageStatusRequest {
            image: Some(image),
            verbose: false,
        }))
    };
    assert!(of("").unwrap().image.is_some());
    // Containerd 1.6 ignores handlers.
    if RUNTIME.is_vm {
        assert!(of("podvisor").unwrap().image.is_some());
        assert_eq!(of("nobody").unwrap_err().code(), Code::InvalidArgument);
    }
}

#[test]
fn guest_users_of_images_are_told_by_number_or_by_name() {
    let of = |repository| {
        let found = status(&image(repository).image).unwrap();
        (found.uid.map(|uid| uid.value), found.username)
    };
    assert_eq!(of("user"), (Some(1000), String::new()));
    assert_eq!(of("named"), (None, "app".to_owned()));
    // Root is reported, or omitted.
    let (uid, name) = of("plain");
    assert!(matches!(uid, None | Some(0)) && name.is_empty());
}

#[test]
fn guest_an_image_of_several_names_is_one_image_with_all_of_them() {
    let names = ["same-a", "same-b", "same-c"].map(|name| image(name).image);
    let found = status(&names[1]).unwrap();
    let mut tags = found.repo_tags.clone();
    tags.sort();
    assert_eq!(tags, names);
    assert_eq!(found.repo_digests.len(), 3, "{found:?}");
    let all = ask_images!(list_images(ListImagesRequest { filter: None })).unwrap();
    let same = all.images.iter().filter(|image| image.id == found.id);
    assert_eq!(same.count(), 1);

    // By digest it has no other tag; without a tag it is `latest`.
    let digest = found.repo_digests[0].clone();
    let pulled = ask_images!(pull_image(PullImageRequest {
        image: spec(&digest),
        ..Default::default()
    }))
    .unwrap();
    assert_eq!(status(&pulled.image_ref).unwrap().repo_tags.len(), 3);
    let bare = names[0].trim_end_matches(":1");
    ask_images!(pull_image(PullImageRequest {
        image: spec(bare),
        ..Default::default()
    }))
    .unwrap();
    let tags = status(bare).unwrap().repo_tags;
    assert!(tags.contains(&format!("{bare}:latest")), "{tags:?}");

    ask_images!(remove_image(RemoveImageRequest {
        image: spec(&found.id),
    }))
    .unwrap();
    for name in names.iter().map(String::as_str).chain([&*found.id, bare]) {
        assert_eq!(status(name), None, "{name}");
    }
}

#[test]
fn guest_an_image_that_is_not_there_has_no_status_and_is_removed_without_complaint() {
    let name = "127.0.0.1:1/none:1";
    assert_eq!(status(name), None);
    ask_images!(remove_image(RemoveImageRequest { image: spec(name) })).unwrap();
    ask_images!(pull_image(PullImageRequest {
        image: spec(name),
        ..Default::default()
    }))
    .unwrap_err();
}

#[test]
fn guest_a_removed_image_is_gone_and_comes_back_by_a_pull() {
    let name = RUNTIME.image("pause");
    let reference = ask_images!(pull_image(PullImageRequest {
        image: spec(&name),
        ..Default::default()
    }))
    .unwrap()
    .image_ref;
    assert_eq!(
        status(&reference).map(|image| image.id),
        status(&name).map(|image| image.id)
    );
    // containerd's own pods need this one.
    if !RUNTIME.is_vm {
        return;
    }
    for _ in 0..2 {
        ask_images!(remove_image(RemoveImageRequest { image: spec(&name) })).unwrap();
        assert_eq!(status(&name), None);
    }
    ask_images!(pull_image(PullImageRequest {
        image: spec(&name),
        ..Default::default()
    }))
    .unwrap();
    assert!(status(&name).is_some());
}

#[test]
fn guest_the_file_system_of_images_is_told() {
    let info = ask_images!(image_fs_info(ImageFsInfoRequest {})).unwrap();
    let first = info.image_filesystems.first().expect("one");
    assert!(first.timestamp > 0);
    assert!(!first.fs_id.as_ref().unwrap().mountpoint.is_empty());
}
