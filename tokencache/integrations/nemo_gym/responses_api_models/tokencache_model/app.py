"""Entry point that Gym starts for `tokencache_model` (as nemo-gym 0.7.0, end of `responses_api_models/vllm_model/app.py`)."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from tokencache.integrations.nemo_gym.model_server import TokencacheModel

if __name__ == "__main__":
    TokencacheModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = TokencacheModel.run_webserver()  # one of several uvicorn workers imports it
