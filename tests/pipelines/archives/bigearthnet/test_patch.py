import datetime

import pyarrow as pa

from pipelines.archives.bigearthnet.patch import dates_and_seasons, flag_lists


def test_dates_and_meteorological_seasons() -> None:
    days = ["20171130", "20171201", "20180228", "20180301", "20180531", "20180601", "20180831", "20180901", "20181340"]
    columns = dates_and_seasons(pa.array([f"S2A_MSIL2A_{day}T101031_21_59" for day in days]))
    assert columns["acquisition_date"].to_pylist()[1] == datetime.date(2017, 12, 1)
    assert columns["acquisition_date"].to_pylist()[-1] is None
    seasons = ["autumn", "winter", "winter", "spring", "spring", "summer", "summer", "autumn", None]
    assert columns["season"].to_pylist() == seasons


def test_flags_are_null_where_one_is_unknown() -> None:
    snow, cloud = pa.array([True, False, True, None, False]), pa.array([False, True, True, True, False])
    assert (
        flag_lists(snow, cloud).to_pylist(),
        flag_lists(pa.array([], pa.bool_()), pa.array([], pa.bool_())).to_pylist(),
    ) == ([["snow"], ["cloud_or_shadow"], ["snow", "cloud_or_shadow"], None, []], [])
