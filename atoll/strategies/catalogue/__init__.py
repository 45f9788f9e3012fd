"""What every method, codec, aggregate and collective is, and where it comes from. No torch."""

from atoll.strategies.catalogue.entry import Entry as Entry
from atoll.strategies.catalogue.entry import Paper as Paper
from atoll.strategies.catalogue.methods import METHODS as METHODS
from atoll.strategies.catalogue.parts import ADMISSIONS as ADMISSIONS
from atoll.strategies.catalogue.parts import AGGREGATES as AGGREGATES
from atoll.strategies.catalogue.parts import CODECS as CODECS
from atoll.strategies.catalogue.parts import COLLECTIVES as COLLECTIVES
