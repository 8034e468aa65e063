from posttrain.api.configs import load as load
from posttrain.api.plans import Plan as Plan
from posttrain.api.plans import plan as plan
from posttrain.api.runs import Run as Run
from posttrain.api.session import start as start
from posttrain.api.training import train as train

__version__: str
