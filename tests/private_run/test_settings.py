"""The settings of a private run: what they state once, and what is refused by name."""

import pytest
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.clipping import AdaptiveClipping
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.private_run.settings import KEPT, PrivacySettings


def test_num_train_must_be_the_data_sets(tmp_path):
    with pytest.raises(ConfigurationError, match="num_train"):
        trainer(tmp_path, privacy(num_train=100)).fit(Plain(), loader())


def settings(**kwargs):
    return PrivacySettings(**{"expected_batch_size": 20, "noise_multiplier": 1.0, "delta": 1e-3, **kwargs})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"noise_multiplier": None}, "exactly one"),
        ({"target_epsilon": 1.0}, "exactly one"),
        ({"noise_multiplier": 0.0}, "not_private"),
        ({"not_private": True}, "not_private"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
        *(({name: "x"}, rf"{name} is 'x'; choose '\w+' or '\w+'") for name in ("unit_of_privacy", "earlier_training")),
        ({"clipping": "x"}, r"clipping is 'x'; choose '\w+' or '\w+'"),
        ({"images_per_group": 2}, r"privacy.images_per_group is 2.*privacy.unit_of_privacy: group"),
        ({"unit_of_privacy": "group", "images_per_group": 0}, "images_per_group is 0; it must be at least 1"),
        (
            {"unit_of_privacy": "group", "images_per_group": 8, "max_physical_batch_size": 7},
            "max_physical_batch_size is 7; it must be at least 8, privacy.images_per_group",
        ),
        ({"augmult": 0}, r"privacy\.augmult is"),
        ({"augmult": 4, "max_physical_batch_size": 3}, r"is 3; it must be at least 4, privacy\.augmult"),
    ],
)
def test_impossible_privacy_settings_are_refused(changed, message):
    with pytest.raises(ConfigurationError, match=message):
        settings(**changed)


CHANGES = {
    "examples": {"examples": "one_by_one"},
    "augmult": {"augmult": 2},
    "disk": {"disk": DiSK(gain=0.5)},
    "frozen_until": {"frozen_until": {"0.*": 0.5}},
    "seed": {"reproducible": True},
    "unit_of_privacy": {"unit_of_privacy": "group"},
    "images_per_group": {"unit_of_privacy": "group", "images_per_group": 2},
    "clipping": {"clipping": "per_layer"},
    "clip_factor": {"clip_factor": "automatic"},
    "max_grad_norm": {"max_grad_norm": 2.0},
    "bands": {"bands": 2},
    "noise_schedule": {"noise_schedule": Schedule("linear", 0.5)},
    "clip_schedule": {"clip_schedule": Schedule("cosine", 0.5)},
    "adaptive_clipping": {"adaptive_clipping": AdaptiveClipping()},
}


@pytest.mark.parametrize("name", KEPT)
def test_a_run_that_resumes_keeps_what_its_statement_says_once(name):
    earlier, now = settings(), settings(**CHANGES[name])
    earlier.require_same(settings().values)
    with pytest.raises(ConfigurationError, match=rf"privacy\.{name} .*Set it to the run's value"):
        now.require_same(earlier.values)
    with pytest.raises(ConfigurationError, match=rf"privacy\.{name} "):
        earlier.require_same(now.values)
